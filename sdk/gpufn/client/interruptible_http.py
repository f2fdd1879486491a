"""Connections whose blocking reads and writes can be interrupted (`gpufn.call.cancellable_wait`).

An interrupt shuts the connection down; the gateway then cancels the disconnected client's call.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from gpufn.call.cancellable_wait import wake_on_cancel


def make_interruptible(transport: Any) -> None:
    """Wrap the connections of an httpx.HTTPTransport, which has no option for it.

    Waits cannot be interrupted if a release of httpx has other internals.
    """
    pool = getattr(transport, "_pool", None)
    if (backend := getattr(pool, "_network_backend", None)) is not None:
        pool._network_backend = _Backend(backend)  # type: ignore[union-attr]


class _Backend:
    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def connect_tcp(self, *args: Any, **options: Any) -> _Connection:
        return _Connection(self._backend.connect_tcp(*args, **options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class _Connection:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, *args: Any, **options: Any) -> Any:
        with wake_on_cancel(self._shut_down):
            return self._stream.read(*args, **options)

    def write(self, *args: Any, **options: Any) -> None:
        with wake_on_cancel(self._shut_down):
            self._stream.write(*args, **options)

    def start_tls(self, *args: Any, **options: Any) -> _Connection:
        return _Connection(self._stream.start_tls(*args, **options))

    def _shut_down(self) -> None:
        """Shut the socket down without closing it.

        Only the reading thread closes it: the file descriptor must not be reused under that thread.
        """
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown, which drops the TLS state under the reading thread.
            socket.socket.shutdown(self._stream.get_extra_info("socket"), socket.SHUT_RDWR)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
