from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from gpufn_builder.checks.measure import Measurement, measure
from gpufn_builder.processes.process_messages import MeasurePlan

PLAN = MeasurePlan(warm_up_s=1.0, least_s=3.0, most_s=9.0)


class Time:
    """A clock that advances by the next value of a table with each run."""

    def __init__(self, runs_s: Iterable[float]) -> None:
        self.now = 100.0
        self.runs = 0
        self._runs_s = iter(runs_s)

    def run(self) -> None:
        self.runs += 1
        self.now += next(self._runs_s)

    def measure(self, plan: MeasurePlan = PLAN, on_progress: Callable[[], object] = lambda: None) -> Measurement:
        return measure(self.run, plan, lambda: self.now, on_progress)


def test_runs_that_agree_are_measured_for_three_windows_after_the_warm_up() -> None:
    time = Time(itertools.chain([0.5, 0.5], itertools.repeat(0.25)))
    found = time.measure()
    assert (found.latency.p50_s, found.latency.p99_s, found.latency.per_s) == (0.25, 0.25, 4.0)
    assert found.latency.settled
    assert (time.runs, time.now) == (2 + 12, 104.0)


def test_a_slow_start_is_measured_until_it_settles_and_is_excluded() -> None:
    time = Time(itertools.chain(itertools.repeat(0.5, 6), itertools.repeat(0.25)))
    found = time.measure()
    assert found.latency.settled
    assert (found.latency.p50_s, found.latency.p99_s) == (0.25, 0.25)


def test_runs_that_never_agree_are_reported_as_unsettled() -> None:
    time = Time(1.1**index for index in itertools.count())
    found = time.measure(MeasurePlan(warm_up_s=0.0, least_s=0.3, most_s=20.0))
    assert not found.latency.settled


def test_a_run_longer_than_the_plan_is_still_measured() -> None:
    time = Time(itertools.repeat(60.0))
    found = time.measure()
    assert (found.latency.p50_s, time.runs) == (60.0, 1 + 3)


def test_percentiles_are_of_all_runs_that_count() -> None:
    time = Time(itertools.chain([1.0], itertools.cycle([0.125] * 17 + [0.25] * 2 + [0.5])))
    found = time.measure(MeasurePlan(warm_up_s=0.5, least_s=3 * 3.125, most_s=20.0))
    assert (found.latency.p50_s, found.latency.p90_s, found.latency.p99_s) == (0.125, 0.25, 0.5)
    assert len(found.quantiles_s) == 101
    assert list(found.quantiles_s) == sorted(found.quantiles_s)
    assert (found.quantiles_s[0], found.quantiles_s[-1]) == (0.125, 0.5)


def test_each_run_is_progress() -> None:
    """Regression: a measurement reported nothing, so a build with a shorter timeout ended."""
    time = Time(itertools.repeat(0.25))
    reported: list[float] = []
    time.measure(on_progress=lambda: reported.append(time.now))
    assert reported == [100.0 + 0.25 * index for index in range(time.runs)]


def test_a_report_of_progress_is_not_part_of_a_run() -> None:
    time = Time(itertools.repeat(0.25))

    def report() -> None:
        time.now += 1.0

    found = time.measure(on_progress=report)
    assert (found.quantiles_s[0], found.quantiles_s[-1]) == (0.25, 0.25)
