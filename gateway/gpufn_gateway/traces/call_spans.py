"""Spans that a gateway records: calls that a client waits for, and requests that queue calls. Pure."""

from __future__ import annotations

from typing import NamedTuple

from gpufn_core.domain import trace_context
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.trace_context import span_id
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.records import CallRecord
from gpufn_core.protocol.spans import Attribute, Span, SpanError, SpanKind, error_of

_NO_ERRORS = (OutcomeKind.SUCCEEDED, OutcomeKind.CANCELLED)


class Called(NamedTuple):
    """A call as its client made it. `trace` is the trace of its message."""

    invocation: str
    function: str
    revision: int
    method: str
    trace: str
    start: float


def of_reply(call: Called, reply: ResultReply, end: float) -> Span:
    """Return the span of a call that ended with a reply."""
    error = None if reply.kind in _NO_ERRORS else error_of(reply.kind, reply.error)
    attributes = {"gpufn.outcome": reply.kind.value, "gpufn.attempts": reply.attempt, "gpufn.gpu_s": reply.gpu_s}
    return _of_call(call, end, error, attributes)


def of_failure(call: Called, error: SpanError | None, end: float) -> Span:
    """Return the span of a call that ended without a reply; no `error` if its client no longer waits."""
    outcome = "cancelled" if error is None else error.code
    return _of_call(call, end, error, {"gpufn.outcome": outcome})


def _of_call(call: Called, end: float, error: SpanError | None, attributes: dict[str, Attribute]) -> Span:
    context = trace_context.of_call(call.invocation, call.trace)
    common = trace_context.attributes(call.invocation, call.function, call.revision)
    return Span(
        context.trace, context.span, context.parent, trace_context.call_name(call.function, call.method),
        SpanKind.SERVER, call.function, call.start, max(call.start, end), common | attributes, error,
    )  # fmt: skip


def of_cancelled(record: CallRecord, end: float) -> Span:
    """Return the span of a submitted call that was cancelled before it started."""
    context = trace_context.of_call(record.id, record.trace)
    attributes = trace_context.attributes(record.id, record.function, record.revision)
    return Span(
        context.trace, context.span, context.parent, trace_context.call_name(record.function, record.method),
        SpanKind.CONSUMER, record.function, record.submitted_at, max(record.submitted_at, end),
        attributes | {"gpufn.outcome": OutcomeKind.CANCELLED.value}, link=context.link,
    )  # fmt: skip


def of_submission(call: Called, end: float) -> Span:
    """Return the span of a request that submitted a call. It is below the span of the call, which ends later."""
    context = trace_context.of_call(call.invocation, call.trace)
    attributes = trace_context.attributes(call.invocation, call.function, call.revision)
    return Span(
        context.trace, span_id(call.invocation, "submit"), context.span, "submit", SpanKind.PRODUCER, call.function,
        call.start, max(call.start, end), attributes,
    )  # fmt: skip


def of_chunk(call: Called, first: int, items: int, end: float) -> Span:
    """Return the span of a request that added items to a map; `call.invocation` is the map. The first span is the span
    of the map, to which its items are linked."""
    context = trace_context.of_call(call.invocation, call.trace)
    is_first = first == 0
    name = f"map {trace_context.call_name(call.function, call.method)}"
    return Span(
        context.trace, context.span if is_first else span_id(call.invocation, first),
        context.parent if is_first else context.span, name if is_first else "items", SpanKind.PRODUCER, call.function,
        call.start, max(call.start, end),
        {
            "faas.name": call.function, "faas.version": str(call.revision), "gpufn.map": call.invocation,
            "gpufn.first_item": first, "gpufn.items": items,
        },
    )  # fmt: skip
