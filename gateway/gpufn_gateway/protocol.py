"""uvicorn's HTTP protocol, with the limits that it lacks: how large a request's head may be, and how long a client
may stall. Costs the ordinary request, which arrives whole, one addition and one look at the clock.

`sweep` hangs up on those that stalled; something calls it about once a second.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
_HEAD_S = 10.0  # a head must be complete so long after its first byte
_BODY_IDLE_S = 10.0  # and its body must not pause for longer
_FIRST_BYTE_S = 30.0  # browsers connect ahead of need

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/problem+json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b"
)
_PROBLEM = (
    b'{"type":"about:blank","title":"Request Header Fields Too Large","status":431,'
    b'"detail":"The request\'s headers are larger than 32 KiB.","code":"bad_request","retryable":false}'
)


class _Phase(enum.Enum):
    BETWEEN = enum.auto()  # requests: none has begun, or the last one has been received whole
    HEAD = enum.auto()
    BODY = enum.auto()


class GuardedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._phase = _Phase.BETWEEN
        self._head_bytes = 0
        self._head_since = 0.0
        self._last_data = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._last_data = self.loop.time()

    def data_received(self, data: bytes) -> None:
        before = self._phase
        self._last_data = self.loop.time()
        super().data_received(data)
        if self._phase is _Phase.HEAD and before is not _Phase.BODY and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse()

    def on_message_begin(self) -> None:
        self._phase = _Phase.HEAD
        self._head_bytes = 0
        self._head_since = self._last_data
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._phase = _Phase.BODY
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._phase = _Phase.BETWEEN
        super().on_message_complete()

    def has_stalled(self, now: float) -> bool:
        """True when the rest of a request, or the first of one, is overdue. `now` on the loop's clock."""
        if self._phase is _Phase.HEAD:
            return now - self._head_since > _HEAD_S
        if self._phase is _Phase.BODY:
            return not self.flow.read_paused and now - self._last_data > _BODY_IDLE_S
        return self.cycle is None and now - self._last_data > _FIRST_BYTE_S

    def _refuse(self) -> None:
        self.transport.write(_TOO_LARGE % (len(_PROBLEM), _PROBLEM))
        self.transport.close()


def sweep(connections: Iterable[Any], now: float) -> int:
    """Hang up on clients that stalled; returns on how many."""
    stalled = [each for each in connections if isinstance(each, GuardedProtocol) and each.has_stalled(now)]
    for connection in stalled:
        connection.transport.close()
    return len(stalled)
