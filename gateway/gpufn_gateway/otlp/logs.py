"""Log lines as OTLP over HTTP, by OpenTelemetry's exporter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from opentelemetry import trace
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from gpufn_core.domain.trace_context import span_id
from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.protocol.messages import LogLine
from gpufn_gateway.otlp.last_message import LastMessage

_TIMEOUT_S: Final = 10.0  # per request, with its retries
_SCOPE: Final = InstrumentationScope("gpufn")
_LOGGER: Final = "opentelemetry.exporter.otlp.proto.http._log_exporter"
_STREAMS: Final = ("stdout", "stderr")
_NONE: Final = TraceFlags(TraceFlags.DEFAULT)

_line = msgspec.msgpack.Decoder(LogLine)


class LogCollector:
    """The collector at `url`, the full address of its logs: http://host:4318/v1/logs. With `has_spans`, attempts have
    spans, which their lines name."""

    def __init__(self, url: str, *, has_spans: bool, timeout_s: float = _TIMEOUT_S) -> None:
        self._exporter = OTLPLogExporter(url, timeout=timeout_s)
        self._resource = Resource.create({"service.name": "gpufn"})
        self._has_spans = has_spans
        self._last = LastMessage(_LOGGER)

    def send(self, batch: Sequence[bytes]) -> str:
        """Send encoded lines. Return "", or why the collector did not take them."""
        self._last.clear()
        records = [record_of(line, self._resource, has_span=self._has_spans) for line in _lines(batch)]
        if self._exporter.export(records) is LogRecordExportResult.SUCCESS:
            return ""
        return self._last.reason

    def interrupt(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _lines(batch: Sequence[bytes]) -> Iterator[LogLine]:
    """Yield the lines that can be decoded: a runner of another version sent the others."""
    for payload in batch:
        try:
            yield _line.decode(payload)
        except DECODE_ERRORS:
            continue


def record_of(line: LogLine, resource: Resource, *, has_span: bool) -> ReadableLogRecord:
    """Return a record of the library. Only failures have their own severity: a stream has none."""
    attributes: dict[str, str | int] = {"faas.name": line.function, "faas.version": str(line.revision)}
    optional = {"gpufn.node": line.node, "gpufn.worker": line.worker, "faas.invocation_id": line.invocation}
    attributes |= {name: value for name, value in optional.items() if value}
    if line.attempt:
        attributes["gpufn.attempt"] = line.attempt
    if line.stream in _STREAMS:
        attributes["log.iostream"] = line.stream
    severity = SeverityNumber.ERROR if line.stream == "error" else SeverityNumber.INFO
    record = LogRecord(
        timestamp=round(line.at * 1e9),
        context=_context(line, has_span=has_span),
        severity_text=severity.name,
        severity_number=severity,
        body=line.text,
        attributes=attributes,
    )
    return ReadableLogRecord(record, resource, _SCOPE)


def _context(line: LogLine, *, has_span: bool) -> Context:
    """Return the place of a line in its trace: the attempt that wrote it."""
    try:
        trace_id = int(line.trace, 16) if line.trace else 0
    except ValueError:
        trace_id = 0
    if not trace_id:
        return Context()
    span = int(span_id(line.invocation, line.attempt), 16) if has_span and line.attempt else 0
    return trace.set_span_in_context(trace.NonRecordingSpan(SpanContext(trace_id, span, True, _NONE)), Context())
