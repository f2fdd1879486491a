"""A connection that is closed in the middle of a request, so that its client still reads the answer.

A kernel answers data that nobody reads with a reset, and a reset discards the answer that is on its way. Clients that
write a whole body before they read (urllib, requests) would get a broken pipe in place of a 413. So the gateway sends
the answer and the end of its own side, then reads and discards for a while (RFC 9112, 9.6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpufn_gateway.http.write_coalescing import JoinedWrites


class ClosingTransport(JoinedWrites):
    """`close` half-closes when `discard` returns True; its owner then discards what arrives, and calls `close_now`."""

    def __init__(self, transport: asyncio.Transport, discard: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._discard = discard
        self._is_half_closed = False

    def write(self, data: bytes | memoryview) -> None:
        if not self._is_half_closed:
            super().write(data)

    def close(self) -> None:
        if self._transport.is_closing() or not self._discard():
            self.close_now()
        elif not self._is_half_closed:
            self._flush()
            self._is_half_closed = True
            self._transport.write_eof()

    def close_now(self) -> None:
        super().close()

    def is_closing(self) -> bool:
        return self._is_half_closed or self._transport.is_closing()
