"""Spans as OTLP over HTTP, by OpenTelemetry's exporter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gpufn_core.protocol import spans
from gpufn_core.protocol.spans import Span
from gpufn_gateway.otlp.last_message import LastMessage

_TIMEOUT_S: Final = 10.0  # per request, with its retries
_SCOPE: Final = InstrumentationScope("gpufn")
_KINDS: Final = {
    spans.SpanKind.INTERNAL: SpanKind.INTERNAL,
    spans.SpanKind.SERVER: SpanKind.SERVER,
    spans.SpanKind.PRODUCER: SpanKind.PRODUCER,
    spans.SpanKind.CONSUMER: SpanKind.CONSUMER,
}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_LOGGER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class SpanCollector:
    """The collector at `url`, the full address of its traces: http://host:4318/v1/traces."""

    def __init__(self, url: str, timeout_s: float = _TIMEOUT_S) -> None:
        self._exporter = OTLPSpanExporter(url, timeout=timeout_s)
        self._resource = Resource.create({"service.name": "gpufn"})
        self._last = LastMessage(_LOGGER)

    def send(self, batch: Sequence[Span]) -> str:
        """Return "", or why the collector did not take the spans."""
        self._last.clear()
        if self._exporter.export([readable(span, self._resource) for span in batch]) is SpanExportResult.SUCCESS:
            return ""
        return self._last.reason

    def interrupt(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def readable(span: Span, resource: Resource | None = None) -> ReadableSpan:
    """Return a span of the library. Raises ValueError for an id that is not hexadecimal."""
    error, end = span.error, _ns(span.end)
    events = []
    attributes = dict(span.attributes)
    if error is not None:
        attributes["error.type"] = error.code
        described = {"exception.type": error.code, "exception.message": error.message}
        events.append(Event("exception", described, end))
    return ReadableSpan(
        span.name,
        _context(span.trace, span.id),
        _context(span.trace, span.parent) if span.parent else None,
        resource,
        attributes,
        events,
        [Link(_context(*span.link))] if span.link is not None else (),
        _KINDS[span.kind],
        status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error.message),
        start_time=_ns(span.start),
        end_time=end,
        instrumentation_scope=_SCOPE,
    )


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=_SAMPLED)


def _ns(at: float) -> int:
    return round(at * 1e9)
