from __future__ import annotations

import pytest

from gpufn_gateway.controller.state.window import Average, Peak, Rate


def test_an_average_weighs_seconds_not_samples() -> None:
    average = Average(60, least=2)
    for _ in range(99):
        average.record(0.5, 8.0)
    average.record(1.5, 0.0)
    assert average.at(2.0) == 4.0


def test_an_average_of_too_little_is_unknown_and_unknown_is_no_sample() -> None:
    average = Average(60, least=2)
    average.record(0.0, 5.0)
    average.record(1.0, None)
    assert average.at(1.0) is None
    average.record(2.0, 5.0)
    assert average.at(2.0) == 5.0


@pytest.mark.parametrize("interval_s", [0.5, 1.0, 7.0])
def test_a_slow_loop_does_not_lengthen_the_window(interval_s: float) -> None:
    average, now = Average(60, least=1), 0.0
    while now < 100:
        average.record(now, 1.0)
        now += interval_s
    while now < 170:
        average.record(now, 0.0)
        now += interval_s
    assert average.at(now) == 0.0


def test_a_rate_is_the_growth_of_a_counter_over_its_span() -> None:
    rate = Rate(6)
    assert rate.per_second(0.0) is None
    for second in range(20):
        rate.record(second, 5.0 * second)
    assert rate.per_second(19.0) == 5.0
    rate.record(20.0, None)
    rate.record(21.0, 0.0)  # a counter that falls gives no negative rate
    assert rate.per_second(21.0) == 0.0


def test_a_rate_after_a_silence_is_unknown() -> None:
    rate = Rate(6)
    rate.record(0.0, 1.0)
    rate.record(1.0, 2.0)
    assert rate.per_second(60.0) is None


def test_a_peak_lasts_as_long_as_its_window() -> None:
    peak = Peak(30)
    for now, value in ((0, 3), (1, 8), (2, 5), (20, 1)):
        peak.record(now, value)
    assert [peak.at(now) for now in (2, 31, 32, 33, 51)] == [8, 8, 5, 1, None]
