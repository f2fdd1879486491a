"""Write the head and the body of a response together.

uvicorn writes them separately: two system calls, two packets, and a client that wakes up twice per response. Here the
first write waits for the second, at most until the current iteration of the event loop ends.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

_MAX_JOINED_BYTES: Final = 64 << 10  # larger bodies are not copied


class CoalescingTransport:
    """A transport that joins consecutive writes. Everything else is delegated to the wrapped transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._pending: bytes | memoryview = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes | memoryview) -> None:
        if not self._pending:
            self._pending = data
            self._loop.call_soon(self._flush)
            return
        pending, self._pending = self._pending, b""
        if len(data) <= _MAX_JOINED_BYTES:
            self._transport.write(b"".join((pending, data)))
        else:
            self._transport.writelines((pending, data))

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pending, self._pending = self._pending, b""
        if pending and not self._transport.is_closing():
            self._transport.write(pending)
