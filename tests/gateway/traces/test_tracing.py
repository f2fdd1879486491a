"""Which calls of a gateway's clients are recorded, and how."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from gpufn_core.domain import trace_context
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.trace_context import span_id, trace_id
from gpufn_core.errors import ErrorInfo, GpufnError, InvocationCancelled, InvocationExpired
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.spans import Span, SpanKind
from gpufn_gateway.traces.call_spans import Called
from gpufn_gateway.traces.tracing import Sampling, Tracing

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALL, MAP = "01k9xq3zr7c8m2v5t000000011", "01k9xq3zr7c8m2v5t0w4y6b1d3"


class Clock:
    def time(self) -> float:
        return 102.0


class Reporter:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, spans: list[Span]) -> None:
        self.spans += spans


def tracing(ratio: float = 0.0, slow_s: float = math.inf) -> tuple[Tracing, Reporter]:
    reporter: Any = Reporter()
    clock: Any = Clock()
    return Tracing(Sampling(ratio, slow_s), reporter, clock), reporter


def reply(kind: OutcomeKind = OutcomeKind.SUCCEEDED) -> ResultReply:
    error = None if kind is OutcomeKind.SUCCEEDED else ErrorInfo("function_raised", "no")
    return ResultReply(CALL, kind, error, "", 3, 1, 0.0, 0.0)


def recorded(outcome: ResultReply | GpufnError, *, flags: str = "00", slow_s: float = math.inf) -> list[Span]:
    """The spans of a call that took two seconds."""
    traced, reporter = tracing(slow_s=slow_s)
    revision, method = SimpleNamespace(number=3), SimpleNamespace(name="m")
    target = SimpleNamespace(name="f", revision=revision, method=method)
    trace = traced.begin(f"00-{TRACE}-{SPAN}-{flags}")
    call: Any = SimpleNamespace(target=target, trace=trace, now=100.0)
    if isinstance(outcome, ResultReply):
        traced.ended(call, outcome, 102.0)
    else:
        traced.failed(call, CALL, outcome)
    return reporter.spans


def test_a_sampled_call_has_a_span_below_that_of_its_client() -> None:
    (span,) = recorded(reply(), flags="01")
    assert (span.id, span.parent, span.kind) == (span_id(CALL), SPAN, SpanKind.SERVER)
    assert (span.name, span.start, span.end, span.error) == ("f.m", 100.0, 102.0, None)


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (reply(OutcomeKind.RAISED), "function_raised"),
        (InvocationExpired("late"), "invocation_expired"),
    ],
)
def test_a_call_that_fails_is_recorded_though_it_is_not_sampled(outcome: ResultReply | GpufnError, code: str) -> None:
    (span,) = recorded(outcome)
    assert span.error is not None
    assert span.error.code == code


def test_a_slow_call_is_recorded_and_a_fast_one_is_not() -> None:
    assert len(recorded(reply(), slow_s=2.0)) == 1
    assert recorded(reply(), slow_s=2.5) == []


def test_a_client_that_no_longer_waits_is_no_error() -> None:
    (span,) = recorded(InvocationCancelled(), flags="01")
    assert (span.error, span.attributes["gpufn.outcome"]) == (None, "cancelled")


@pytest.mark.parametrize("text", ["", f"00-{'0' * 32}-{SPAN}-01", f"ff-{TRACE}-{SPAN}-01"])
def test_a_call_without_a_traceparent_begins_a_trace(text: str) -> None:
    first, second = (tracing(1.0)[0].begin(text) for _ in range(2))
    assert first[:35] != second[:35]
    assert trace_context.of_call(CALL, first).parent == ""
    assert trace_context.is_sampled(first)


def test_all_chunks_of_a_map_belong_to_one_trace() -> None:
    traced, reporter = tracing(1.0)
    for first in (0, 2):
        traced.mapped(Called(MAP, "f", 3, "", traced.begin_map(traced.begin(), MAP), 100.0), first, 2)
    whole, chunk = reporter.spans
    assert {whole.trace, chunk.trace} == {trace_id(MAP)}
    assert (whole.id, whole.parent, chunk.parent) == (span_id(MAP), "", span_id(MAP))
    sent = traced.begin(f"00-{TRACE}-{SPAN}-01")
    assert traced.begin_map(sent, MAP) == sent


def test_items_of_a_map_begin_without_the_tracestate_of_its_client() -> None:
    traced, _ = tracing()
    trace = traced.begin(f"00-{TRACE}-{SPAN}-01 a=1")
    assert trace_context.tracestate(trace) == "a=1"
    assert trace_context.tracestate(traced.begin_map(trace, MAP)) == ""
