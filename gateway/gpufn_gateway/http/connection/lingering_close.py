"""Lingering close: close a connection in the middle of a request so that the client can still read the response.

If a socket is closed with unread data, the kernel sends a reset, and the reset discards the response in transit.
Clients that write a whole body before they read (urllib, requests) would get a broken pipe instead of a 413. So the
gateway sends the response and half-closes the connection, then reads and discards for a while (RFC 9112, 9.6). TLS in
asyncio has no half-close: the client detects the end of the response by its length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpufn_gateway.http.connection.write_coalescing import CoalescingTransport


class ClosingTransport(CoalescingTransport):
    """`close` half-closes if `discard` returns True. The owner then discards incoming data and calls `close_now`."""

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
            if self._transport.can_write_eof():
                self._transport.write_eof()

    def close_now(self) -> None:
        super().close()

    @property
    def is_closed(self) -> bool:
        """True after `close_now`, while the wrapped transport still has output or waits for the client."""
        return self._transport.is_closing()

    def is_closing(self) -> bool:
        return self._is_half_closed or self._transport.is_closing()
