"""A receiver that hangs gets a few attempts at a time, and unlimited ones once it answers again."""

from __future__ import annotations

import pytest

from gpufn_gateway.webhooks.concurrency import MAX_CONCURRENT, MIN_INTERVAL_S, RETRY_AFTER_S, SLOW_S, Receivers

A, B = "a.example", "b.example"


def _slow(now: float = SLOW_S, tries: int = MAX_CONCURRENT) -> Receivers:
    receivers = Receivers()
    for _ in range(tries):
        assert receivers.begin(A, 0.0) == 0
    assert receivers.begin(A, now) == RETRY_AFTER_S
    return receivers


def test_a_fast_receiver_gets_all_deliveries() -> None:
    receivers = Receivers()
    for number in range(100 * MAX_CONCURRENT):
        assert receivers.begin(A, now=number / 1e6) == 0
    for _ in range(MAX_CONCURRENT - 1):  # a few hanging attempts do not make it slow
        assert receivers.begin(B, 0.0) == 0
    assert receivers.begin(B, 600.0) == 0


def test_a_slow_receiver_does_not_delay_others() -> None:
    assert _slow().begin(B, SLOW_S) == 0


def test_a_slow_one_stays_slow_while_its_tries_fail_late() -> None:
    receivers = _slow(tries=3 * MAX_CONCURRENT)
    for _ in range(2 * MAX_CONCURRENT):
        receivers.end(A, 0.0, now=15.0)
    assert receivers.begin(A, 15.0) > 0
    receivers.end(A, 0.0, now=15.0)
    assert receivers.begin(A, 15.0) == 0  # one of the few slots
    assert receivers.begin(A, 15.0) > 0


def test_a_receiver_that_is_fast_again_gets_all_deliveries_again() -> None:
    receivers = _slow()
    receivers.end(A, 0.0, now=15.0)
    assert receivers.begin(A, 15.0) == 0
    receivers.end(A, 15.0, now=15.1)
    assert [receivers.begin(A, 15.1) for _ in range(10 * MAX_CONCURRENT)] == [0.0] * 10 * MAX_CONCURRENT


def test_postponed_deliveries_return_one_after_the_other() -> None:
    receivers = _slow()
    delays = [receivers.begin(A, SLOW_S) for _ in range(3)]
    assert delays == pytest.approx([RETRY_AFTER_S + number * MIN_INTERVAL_S for number in (1, 2, 3)])
    assert receivers.begin(A, SLOW_S + 60) == RETRY_AFTER_S


def test_a_receiver_without_deliveries_is_forgotten() -> None:
    receivers = Receivers()
    for now in range(100):
        assert receivers.begin(f"{now}.example", now) == 0
        receivers.end(f"{now}.example", now, now + 15.0)
    assert not receivers._receivers


def test_a_delivery_that_did_not_start_leaves_a_slow_one_slow() -> None:
    receivers = _slow(tries=2 * MAX_CONCURRENT)
    receivers.withdraw(A, 0.0)
    assert receivers.begin(A, 15.0) > 0
