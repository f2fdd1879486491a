"""Length limit of the local backlog."""

from __future__ import annotations

from gpufn_runtime.runner.core.backlog import Backlog


def line_after(calls: int, run_s: float, body_bytes: int = 10) -> Backlog:
    line = Backlog()
    for _ in range(calls):
        line.ended(run_s, body_bytes)
    return line


def test_no_call_waits_at_a_worker_until_calls_are_known_to_be_short() -> None:
    assert Backlog().max_length(at_once=4) == 0
    assert not Backlog().is_short


def test_the_line_is_as_long_as_one_short_call() -> None:
    assert line_after(200, run_s=0.0045).max_length(at_once=1) == 4
    assert line_after(200, run_s=0.0045).max_length(at_once=3) == 13
    assert line_after(200, run_s=0.00001).max_length(at_once=1) == 64, "there is a bound"


def test_long_calls_have_no_line() -> None:
    assert line_after(200, run_s=0.5).max_length(at_once=8) == 0


def test_large_calls_have_a_short_line() -> None:
    assert 3 <= line_after(200, run_s=0.0001, body_bytes=4 << 20).max_length(at_once=1) <= 4


def test_a_call_that_lasts_closes_the_line() -> None:
    line = line_after(200, run_s=0.001)
    line.is_closed = True
    assert line.max_length(at_once=1) == 0
    line.is_closed = False
    assert line.max_length(at_once=1) > 0
