"""Connections that a wait can be woken from (`gpufn.call.cancellable_wait`): they are shut, and the gateway cancels the call of a
client that has gone."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from gpufn.call.cancellable_wait import woken_by


def make_leavable(transport: Any) -> None:
    """An httpx.HTTPTransport, which has no option for it. With one that is made otherwise nobody can leave early."""
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
        with woken_by(self._shut):
            return self._stream.read(*args, **options)

    def write(self, *args: Any, **options: Any) -> None:
        with woken_by(self._shut):
            self._stream.write(*args, **options)

    def start_tls(self, *args: Any, **options: Any) -> _Connection:
        return _Connection(self._stream.start_tls(*args, **options))

    def _shut(self) -> None:
        """Not closed: that is for the thread that reads it, before its number is another file's."""
        with contextlib.suppress(OSError):
            # Not an SSLSocket's own, which takes its TLS from under the thread that reads.
            socket.socket.shutdown(self._stream.get_extra_info("socket"), socket.SHUT_RDWR)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
