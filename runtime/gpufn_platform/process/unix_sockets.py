"""Unix sockets between platform processes: peer credentials, and batching of small writes."""

from __future__ import annotations

import asyncio
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


def peer_uid(transport: asyncio.BaseTransport) -> int:
    """Return the user id of the peer process as the kernel knows it (SO_PEERCRED)."""
    sock: socket.socket = transport.get_extra_info("socket")
    uid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return uid


class Outbox:
    """Joins all writes of one event loop iteration: each write is a system call and wakes the reading process.

    Data written in the iteration that closes the socket is dropped."""

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
