"""The last traces in memory, within a number of bytes. The oldest trace makes room.

Spans are kept encoded, so that their size is known, and decoded for a reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from gpufn_core.protocol.spans import Span, SpanKind

MAX_BYTES: Final = 32 << 20
MAX_SPANS: Final = 5_000  # per trace
_SPAN_BYTES: Final = 100  # overhead of a span in memory, in addition to its encoding
_TRACE_BYTES: Final = 1_000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Span).decode


class Share(msgspec.Struct):
    """The spans of one function in a trace. `name` and `invocation` belong to its first call, if there is one."""

    function: str
    start: float
    end: float
    name: str = ""
    invocation: str = ""
    is_call: bool = False  # otherwise the first span of any kind
    spans: int = 0
    errors: int = 0

    def add(self, span: Span) -> None:
        is_call = span.kind in (SpanKind.SERVER, SpanKind.CONSUMER)
        if (is_call and (not self.is_call or span.start < self.start)) or not self.name:
            self.name, self.is_call = span.name, is_call
            self.invocation = str(span.attributes.get("faas.invocation_id", ""))
        self.start, self.end = min(self.start, span.start), max(self.end, span.end)
        self.spans += 1
        self.errors += span.error is not None


class _Trace(msgspec.Struct):
    spans: list[bytes]
    shares: dict[str, Share]
    invocations: set[str]
    size: int = _TRACE_BYTES
    left_out: int = 0  # spans beyond MAX_SPANS


class Summary(msgspec.Struct, frozen=True):
    """A trace in a list. `spans` and `errors` count the spans of the functions that the reader may see."""

    id: str
    name: str
    function: str
    invocation: str
    start: float
    end: float
    spans: int
    errors: int


class TraceStore:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._traces: dict[str, _Trace] = {}  # oldest first
        self._by_invocation: dict[str, str] = {}

    def add(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._add(span)
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._traces)))

    def find(self, trace_or_invocation: str) -> str | None:
        """Return the id of a trace, from its own id or from an invocation that belongs to it."""
        if trace_or_invocation in self._traces:
            return trace_or_invocation
        return self._by_invocation.get(trace_or_invocation)

    def spans(self, trace: str, may_read: Callable[[str], bool]) -> list[Span]:
        """Return the spans of the functions that the reader may see, by their start."""
        decoded = map(_decode, self._traces[trace].spans)
        return sorted((span for span in decoded if may_read(span.function)), key=lambda span: (span.start, -span.end))

    def left_out(self, trace: str) -> int:
        return self._traces[trace].left_out

    def recent(self, may_read: Callable[[str], bool]) -> Iterator[Summary]:
        """Yield the traces in which the reader may see a function, newest first."""
        for trace_id, trace in reversed(self._traces.items()):
            shares = [share for name, share in trace.shares.items() if may_read(name)]
            if shares:
                first = min(shares, key=lambda share: (not share.is_call, share.start))
                yield Summary(
                    trace_id,
                    first.name,
                    first.function,
                    first.invocation,
                    min(share.start for share in shares),
                    max(share.end for share in shares),
                    sum(share.spans for share in shares),
                    sum(share.errors for share in shares),
                )

    def _add(self, span: Span) -> None:
        trace = self._traces.get(span.trace)
        if trace is None:
            trace = self._traces[span.trace] = _Trace([], {}, set())
            self._bytes += trace.size
        if len(trace.spans) >= MAX_SPANS:
            trace.left_out += 1
            return
        encoded = _encode(span)
        trace.spans.append(encoded)
        share = trace.shares.get(span.function)
        if share is None:
            share = trace.shares[span.function] = Share(span.function, span.start, span.end)
        share.add(span)
        size = len(encoded) + _SPAN_BYTES
        invocation = span.attributes.get("faas.invocation_id")
        if isinstance(invocation, str) and invocation not in trace.invocations:
            trace.invocations.add(invocation)
            self._by_invocation[invocation] = span.trace
            size += _SPAN_BYTES + len(invocation)
        trace.size += size
        self._bytes += size

    def _forget(self, trace_id: str) -> None:
        trace = self._traces.pop(trace_id)
        self._bytes -= trace.size
        for invocation in trace.invocations:
            if self._by_invocation.get(invocation) == trace_id:
                del self._by_invocation[invocation]
