"""Unix sockets between our processes: who is at the other end, and how to write little and often."""

from __future__ import annotations

import asyncio
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


def peer_uid(transport: asyncio.BaseTransport) -> int:
    """The user id of the process that connected, or listened, as the kernel knows it (SO_PEERCRED)."""
    ours: socket.socket = transport.get_extra_info("socket")
    uid: int = _CREDENTIALS.unpack(ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid


class Outbox:
    """Joins what is written in one turn of the loop: each write is a system call and wakes the process that reads.
    What is written in the turn that closes the socket is dropped."""

    __slots__ = ("_loop", "_parts", "_transport")

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if not self._transport.is_closing():
            self._transport.writelines(parts)
