"""Who is at the other end of a unix socket."""

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
