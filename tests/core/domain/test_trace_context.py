"""Ids and decisions of traces, which every process derives."""

from __future__ import annotations

import math

import pytest

from gpufn_core.domain import trace_context
from gpufn_core.domain.trace_context import NO_SPAN, span_id, trace_id

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALL, ITEM = "01k9xq3zr7c8m2v5t000000011", "01k9xq3zr7c8m2v5t0w4y6b1d3-17"
SENT = f"00-{TRACE}-{SPAN}-01"


def test_a_call_is_below_the_span_of_its_client() -> None:
    context = trace_context.of_call(CALL, trace_context.traced(SENT, 2.5))
    assert context == (TRACE, span_id(CALL), SPAN, None)


def test_a_trace_that_begins_here_has_no_parent() -> None:
    context = trace_context.of_call(CALL, trace_context.begun(TRACE, 1.0, math.inf))
    assert (context.trace, context.parent) == (TRACE, "")


def test_an_item_of_a_map_has_a_trace_of_its_own_and_a_link_to_its_map() -> None:
    context = trace_context.of_call(ITEM, trace_context.traced(SENT, math.inf))
    assert (context.trace, context.parent) == (trace_id(ITEM), "")
    assert context.link == (TRACE, span_id(ITEM.partition("-")[0]))


@pytest.mark.parametrize("invocation", [CALL, ITEM])
def test_a_nested_call_is_below_the_attempt_that_makes_it(invocation: str) -> None:
    trace = trace_context.traced(SENT, 2.5)
    message = trace_context.of_nested_call(invocation, 3, trace)
    nested = trace_context.of_call("01k9xq3zr7c8m2v5t000000012", message)
    assert (nested.trace, nested.parent) == (trace_context.of_call(invocation, trace).trace, span_id(invocation, 3))
    assert message[53:] == trace[53:]  # the decision, and the threshold
    shown = trace_context.of_attempt(invocation, 3, trace)
    assert (len(shown), shown[36:52]) == (trace_context.LENGTH, span_id(invocation, 3))


def test_an_untraced_message_is_passed_through() -> None:
    assert not trace_context.is_traced(SENT)
    assert trace_context.of_nested_call(CALL, 1, SENT) == trace_context.traceparent(CALL, SENT) == SENT
    assert trace_context.of_nested_call(CALL, 1, "") == trace_context.traceparent(CALL, "") == ""


def test_a_traceparent_is_shown_without_fields_of_the_platform() -> None:
    assert trace_context.traceparent(CALL, trace_context.traced(SENT, 2.5)) == f"00-{TRACE}-{span_id(CALL)}-01"
    begun = trace_context.traceparent(CALL, trace_context.begun(TRACE, 0.0, 2.5))
    assert begun == f"00-{TRACE}-{span_id(CALL)}-00"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SENT, True),
        (f"01-{TRACE}-{SPAN}-00", True),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{NO_SPAN}-01", False),
    ],
)
def test_ids_of_zeros_and_a_version_that_cannot_exist_are_no_traceparent(text: str, expected: bool) -> None:
    assert trace_context.is_traceparent(text) is expected


@pytest.mark.parametrize(
    ("ratio", "is_sampled"), [(0.0, [False] * 4), (0.5, [True, True, False, False]), (1.0, [True] * 4)]
)
def test_the_ratio_is_of_the_values_that_a_trace_id_may_have(ratio: float, is_sampled: list[bool]) -> None:
    ids = [f"{TRACE[:18]}{digits}" for digits in ("0" * 14, "7" + "f" * 13, "8" + "0" * 13, "f" * 14)]
    assert [trace_context.is_sampled(trace_context.begun(each, ratio, math.inf)) for each in ids] == is_sampled


@pytest.mark.parametrize(
    ("flags", "is_error", "took_s", "kept"),
    [
        ("01", False, 0.1, True),
        ("03", False, 0.1, True),  # random and sampled
        ("00", False, 0.1, False),
        ("02", False, 2.4, False),
        ("00", True, 0.1, True),
        ("00", False, 2.5, True),
    ],
)
def test_a_call_that_fails_or_is_slow_is_kept_though_it_is_not_sampled(
    flags: str, is_error: bool, took_s: float, kept: bool
) -> None:
    trace = trace_context.traced(f"00-{TRACE}-{SPAN}-{flags}", 2.5)
    assert trace_context.keeps(trace, is_error=is_error, took_s=took_s) is kept


def test_without_a_threshold_no_call_is_slow() -> None:
    trace = trace_context.traced(f"00-{TRACE}-{SPAN}-00", math.inf)
    assert not trace_context.keeps(trace, is_error=False, took_s=9e9)


def test_each_span_has_an_id_of_its_own() -> None:
    ids = {
        span_id(CALL),
        span_id(CALL, 1),
        span_id(CALL, 2),
        span_id(CALL, 1, "queue"),
        span_id(ITEM),
        span_id(ITEM, 1),
    }
    assert len(ids) == 6
    assert all(len(each) == 16 and int(each, 16) for each in ids)


@pytest.mark.parametrize("slow_s", [math.inf, 2.5])
def test_a_tracestate_reaches_the_attempt_and_its_nested_calls(slow_s: float) -> None:
    trace = trace_context.traced(f"{SENT} a=1,b=x y", slow_s)
    nested = trace_context.of_nested_call(CALL, 1, trace)
    assert trace_context.is_traced(nested)
    assert [trace_context.tracestate(each) for each in (trace, nested)] == ["a=1,b=x y"] * 2
    assert trace_context.seen_by_attempt(CALL, 1, trace) == f"00-{TRACE}-{span_id(CALL, 1)}-01"
    unsampled = trace.replace("-01;", "-00;")
    assert trace_context.keeps(unsampled, is_error=False, took_s=3.0) is (slow_s == 2.5)
    assert trace_context.without_state(trace) == trace_context.traced(SENT, slow_s)


def test_a_tracestate_is_passed_through_while_the_platform_does_not_trace() -> None:
    trace = f"{SENT} a=1"
    assert not trace_context.is_traced(trace)
    assert trace_context.of_nested_call(CALL, 1, trace) == trace
    assert trace_context.seen_by_attempt(CALL, 1, trace) == trace_context.traceparent(CALL, trace) == SENT
