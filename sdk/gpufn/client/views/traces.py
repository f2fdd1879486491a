"""Spans of calls, and traces (docs/http.md)."""

from __future__ import annotations

import msgspec


class SpanError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str = ""


class SpanLink(msgspec.Struct, frozen=True, kw_only=True):
    """A span of another trace, such as the trace of the map to which a call belongs."""

    trace: str
    span: str


class SpanView(msgspec.Struct, frozen=True, kw_only=True):
    """A span. Times are in UNIX seconds; `attributes` have the names of OpenTelemetry's conventions, or ``gpufn.*``."""

    id: str
    parent: str | None = None
    name: str
    kind: str
    function: str = ""
    start: float
    end: float
    attributes: dict[str, str | int | float | bool] = {}
    error: SpanError | None = None
    link: SpanLink | None = None


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of a trace. `left_out` counts spans that the gateway did not keep."""

    id: str
    spans: tuple[SpanView, ...] = ()
    left_out: int = 0


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A trace in a list. `name` and `invocation` belong to its first call."""

    id: str
    name: str = ""
    function: str = ""
    invocation: str = ""
    start: float
    end: float
    spans: int = 0
    errors: int = 0


class TracesView(msgspec.Struct, frozen=True, kw_only=True):
    """The traces that a gateway keeps, newest first. `enabled`: calls are traced."""

    enabled: bool = False
    traces: tuple[TraceSummary, ...] = ()
