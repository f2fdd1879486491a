"""Options of a call from its request headers."""

from __future__ import annotations

import pytest

from gpufn_core.domain.trace_context import tracestate
from gpufn_core.errors import GpufnError
from gpufn_core.spec.priority import Priority
from gpufn_gateway.calls.call_headers import CallOptions, parse_call_options

NOW = 1000.0
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_missing_headers_leave_options_unset() -> None:
    assert parse_call_options({}, NOW) == CallOptions(None, None, None, "")


def test_each_header_is_read() -> None:
    headers = {
        b"x-gpufn-timeout": b"2.5",
        b"x-gpufn-deadline": b"1060",
        b"x-gpufn-priority": b"hi",
        b"traceparent": TRACE.encode(),
    }
    assert parse_call_options(headers, NOW) == CallOptions(2.5, 1060.0, Priority.HI, TRACE)


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        *((b"x-gpufn-timeout", value, "invalid_input") for value in (b"0", b"-1", b"nan", b"inf", b"soon", b"604801")),
        (b"x-gpufn-deadline", b"soon", "invalid_input"),
        (b"x-gpufn-deadline", b"nan", "invalid_input"),
        (b"x-gpufn-deadline", b"605801", "invalid_input"),
        (b"x-gpufn-deadline", b"1000", "deadline_passed"),
        (b"x-gpufn-deadline", b"-inf", "deadline_passed"),
        (b"x-gpufn-priority", b"HI", "invalid_input"),
        (b"x-gpufn-priority", b"\xff", "invalid_input"),
    ],
)
def test_impossible_values_are_refused(header: bytes, value: bytes, code: str) -> None:
    with pytest.raises(GpufnError) as refused:
        parse_call_options({header: value}, NOW)
    assert refused.value.code == code


@pytest.mark.parametrize("trace", [b"", b"nonsense", TRACE.upper().encode(), TRACE.encode() + b"\n"])
def test_a_trace_that_is_none_is_left_out(trace: bytes) -> None:
    assert parse_call_options({b"traceparent": trace}, NOW).trace == ""


@pytest.mark.parametrize(
    ("timeout_s", "deadline", "remaining_s"),
    [
        (None, None, None),
        (30.0, None, 30.0),
        (None, 1010.0, 6.0),
        (30.0, 1010.0, 6.0),
        (2.0, 1010.0, 2.0),
        (30.0, 1001.0, -3.0),
    ],
)
def test_a_timeout_begins_when_the_body_is_there_and_a_deadline_does_not_wait_for_it(
    timeout_s: float | None, deadline: float | None, remaining_s: float | None
) -> None:
    assert CallOptions(timeout_s, deadline, None, "").remaining_s(now=1004.0) == remaining_s


@pytest.mark.parametrize(
    ("sent", "state"),
    [
        (b"congo=t61rcWkgMzE", "congo=t61rcWkgMzE"),
        (b"a=1 , ,\tb@c/d=x y", "a=1,b@c/d=x y"),
        (b"", ""),
        (b"A=1", ""),
        (b"a=1=2", ""),
        (b"a=\xff", ""),
        (b"a=1,b", ""),
        (b"a=1,b=" + b"x" * 600, "a=1"),
        (b"a=" + b"x" * 600, ""),
    ],
)
def test_a_tracestate_follows_its_traceparent_unless_it_is_malformed(sent: bytes, state: str) -> None:
    trace = parse_call_options({b"traceparent": TRACE.encode(), b"tracestate": sent}, NOW).trace
    assert (trace[: len(TRACE)], tracestate(trace)) == (TRACE, state)


def test_a_tracestate_without_a_traceparent_is_ignored() -> None:
    assert parse_call_options({b"tracestate": b"a=1"}, NOW).trace == ""
    assert parse_call_options({b"tracestate": b"a=1", b"traceparent": b"nonsense"}, NOW).trace == ""
