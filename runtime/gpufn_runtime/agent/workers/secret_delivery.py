"""Delivery of secrets to a new worker, over a socket in its folder: nothing is written to a disk, a template process
or a container's settings. The kernel names the process that connects; only the worker receives the values.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpufn_runtime.agent.launchers.base import NodeFault
from gpufn_runtime.agent.workers import processes

log = logging.getLogger(__name__)

_WITHIN_S = 120.0  # a cold interpreter on a busy machine
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class SecretDelivery:
    """Listens from its construction on. Raises NodeFault if it cannot."""

    def __init__(self, path: Path, values: Mapping[str, str]) -> None:
        self._path = path
        self._values = values
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            path.unlink(missing_ok=True)
            self._socket.bind(os.fspath(path))
            path.chmod(0o600)
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise NodeFault(f"Cannot create the socket {path}: {error.strerror}.") from error

    async def deliver(self, pid: int) -> None:
        """Send the values to the worker `pid`, or to the child of a container's first process `pid`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_WITHIN_S):
                while True:
                    peer, _ = await loop.sock_accept(self._socket)
                    with peer, contextlib.suppress(OSError):  # the worker has ended
                        if _is_worker(peer, pid):
                            await loop.sock_sendall(peer, msgspec.json.encode(self._values))
                            return
                        log.warning("a process other than the worker %d requested its secrets", pid)
        except TimeoutError:
            log.warning("the worker %d has not requested its secrets within %g s", pid, _WITHIN_S)
        finally:
            self.close()

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def _is_worker(peer: socket.socket, pid: int) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    connected: int = _CREDENTIALS.unpack(credentials)[0]
    return connected == pid or connected in processes.children(pid)
