"""Each rule that a peer learned the hard way, and the formula, as tables."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_gateway.controller.decide.scaling.policy import Demand, ScaleDecision, Workers, decide, effective
from tests.gateway.controller.simulation import function

BUSY = Demand(queued=0, running=4, service_s=0.4)
POLICY = ScalingPolicy(max_workers=10)


@pytest.mark.parametrize(
    ("demand", "workers", "count", "reason"),
    [
        (Demand(queued=0, running=0), Workers(), 0, "no calls: no workers"),
        (Demand(queued=1, running=0), Workers(), 1, "1 queued, 0 running: 1 worker"),
        (Demand(queued=12, running=2, service_s=0.4), Workers(2), 5, "12 queued, 2 running, 400 ms each: 5 workers"),
        (Demand(queued=40, running=0, service_s=9.0), Workers(), 10,
         "40 queued, 0 running, 9 s each: 10 workers (max_workers)"),
        (Demand(queued=3, running=0, service_s=60.0), Workers(), 3, "3 queued, 0 running, 60 s each: 3 workers"),
        (Demand(queued=0, running=1, service_s=1.0, average_in_flight=2.1, peak_calls_60s=4), Workers(1), 3,
         "0 queued, 1 running, 1 s each: 3 workers"),
        (Demand(queued=0, running=3, service_s=0.1, arrivals_per_s=20.0, peak_calls_6s=5), Workers(2), 3,
         "0 queued, 3 running, 100 ms each: 3 workers"),
        (Demand(queued=0, running=1, service_s=0.000_15), Workers(1), 1, "0 queued, 1 running, 150 µs each: 1 worker"),
        (Demand(queued=0, running=0, idle_s=12.0), Workers(1, idle=1), 1, "nothing to do for 12 s of 60 s: 1 worker"),
        (Demand(queued=0, running=0, idle_s=61.0), Workers(1, idle=1), 0, "idle for 61 s of 60 s: no workers"),
    ],
)  # fmt: skip
def test_the_formula(demand: Demand, workers: Workers, count: int, reason: str) -> None:
    decision = decide(POLICY, demand, workers)
    assert (decision.count, decision.reason) == (count, reason)


def test_missing_data_changes_nothing() -> None:
    last = ScaleDecision(3, "3 of them", want=3, terms={"want": 3})
    assert decide(POLICY, None, Workers(ready=3, idle=3), last=last) == ScaleDecision(
        3, "demand unknown: keep 3 workers", terms={"want": 3}
    )
    assert decide(POLICY, None, Workers(ready=2)).count == 2
    assert decide(POLICY, None, Workers(ready=2, idle=2), last=ScaleDecision(1, "", want=1)).count == 2


def test_an_unknown_term_has_no_effect_and_is_not_shown() -> None:
    terms = decide(POLICY, Demand(queued=8, running=0), Workers()).terms
    assert (terms["want"], "service_s" in terms) == (1, False)


def test_running_calls_count_as_well_as_queued_ones() -> None:
    queued = decide(POLICY, Demand(queued=6, running=0, service_s=1.0), Workers())
    running = decide(POLICY, Demand(queued=0, running=6, service_s=1.0), Workers())
    assert queued.count == running.count == 6


@pytest.mark.parametrize(("stuck", "slots", "count"), [(0, 1, 1), (1, 1, 2), (3, 4, 1), (4, 4, 2)])
def test_a_worker_with_only_abandoned_calls_counts_as_none(stuck: int, slots: int, count: int) -> None:
    demand = Demand(queued=1, running=0, stuck=stuck, service_s=0.1)
    assert decide(POLICY, demand, Workers(1, slots=slots)).count == count
    assert decide(POLICY, msgspec.structs.replace(demand, queued=0), Workers(1, slots=slots)).count == 1


def test_a_starting_worker_is_capacity() -> None:
    demand = Demand(queued=3, running=0, service_s=1.0)
    assert decide(POLICY, demand, Workers(starting=3)).count == 3


@pytest.mark.parametrize("held", [1, 2, 3, 4, 7])
def test_it_always_moves_by_at_least_one_and_by_at_most_a_half(held: int) -> None:
    decision = decide(POLICY, Demand(queued=0, running=0, idle_s=99.0), Workers(held, idle=held))
    assert decision.count == held - max(1, held // 2)


def test_it_stays_above_the_peak_of_the_window() -> None:
    calm = Demand(queued=0, running=1, service_s=0.1)
    workers = Workers(8, idle=7)
    assert [decide(POLICY, calm, workers, peak=peak).count for peak in (8, 7, 3, None)] == [8, 7, 4, 4]


def test_only_idle_workers_go() -> None:
    calm = Demand(queued=0, running=1, service_s=0.1)
    assert [decide(POLICY, calm, Workers(8, idle=idle)).count for idle in (0, 1, 7)] == [8, 7, 4]


@pytest.mark.parametrize(
    ("demand", "count"),
    [
        (Demand(queued=0, running=0, idle_s=None), 1),  # busy until just now, or its runner is silent
        (Demand(queued=0, running=0, idle_s=59.9), 1),
        (Demand(queued=0, running=1, idle_s=None), 1),
        (Demand(queued=1, running=0, idle_s=99.0), 1),
        (Demand(queued=0, running=0, idle_s=60.0), 0),
    ],
)
def test_zero_needs_no_calls_and_the_whole_idle_timeout(demand: Demand, count: int) -> None:
    assert decide(POLICY, demand, Workers(1, idle=1)).count == count


def test_an_average_of_the_last_minute_starts_no_worker_without_a_call() -> None:
    assert decide(POLICY, Demand(queued=0, running=0, average_in_flight=3.0, peak_calls_60s=5), Workers()).count == 0


def test_a_call_always_wants_a_worker() -> None:
    assert decide(ScalingPolicy(idle_timeout_s=0), Demand(queued=1, running=0, service_s=0.001), Workers()).count == 1


@pytest.mark.parametrize(
    ("policy", "calls", "count", "limited"),
    [
        (ScalingPolicy(min_workers=2), 0, 2, False),
        (ScalingPolicy(max_workers=2), 5, 2, True),
        (ScalingPolicy(max_workers=0), 1, 0, True),
        (ScalingPolicy(buffer_workers=2), 0, 0, False),
        (ScalingPolicy(buffer_workers=2), 1, 3, False),
        (ScalingPolicy(buffer_workers=9, max_workers=4), 1, 4, False),
    ],
)
def test_bounds_and_the_buffer(policy: ScalingPolicy, calls: int, count: int, limited: bool) -> None:
    decision = decide(policy, Demand(queued=calls, running=0, service_s=2.0), Workers())
    assert (decision.count, decision.limited) == (count, limited)


def test_slots_of_a_batching_worker_are_used_before_another_worker() -> None:
    assert decide(POLICY, Demand(queued=64, running=0, service_s=1.0), Workers(slots=64)).count == 1


@pytest.mark.parametrize(
    ("minimum", "maximum", "expected"),
    [(None, None, (1, 4)), (2, None, (2, 4)), (6, None, (6, 6)), (None, 0, (0, 0)), (None, 9, (1, 9)), (3, 3, (3, 3))],
)
def test_settings_of_the_function_replace_those_of_the_spec(
    minimum: int | None, maximum: int | None, expected: tuple[int, int]
) -> None:
    policy = effective(ScalingPolicy(min_workers=1), function(min_workers=minimum, max_workers=maximum))
    assert (policy.min_workers, policy.max_workers) == expected


EXPECTED = "a call is expected at 09:00 UTC, as on the last days"


@pytest.mark.parametrize(
    ("policy", "demand", "workers", "count", "reason"),
    [
        (ScalingPolicy(prewarm=True), Demand(queued=0, running=0, expected=EXPECTED), Workers(), 1,
         f"{EXPECTED}: 1 worker"),
        (ScalingPolicy(prewarm=True), Demand(queued=0, running=0, expected=EXPECTED), Workers(starting=1), 1,
         f"{EXPECTED}: 1 worker"),
        (ScalingPolicy(prewarm=True), Demand(queued=0, running=0, idle_s=999, expected=EXPECTED), Workers(3, idle=3), 2,
         f"{EXPECTED}: 1 worker, 2 for now"),
        (ScalingPolicy(prewarm=True, buffer_workers=2), Demand(queued=0, running=0, expected=EXPECTED), Workers(), 1,
         f"{EXPECTED}: 1 worker"),
        (ScalingPolicy(prewarm=True, max_workers=0), Demand(queued=0, running=0, expected=EXPECTED), Workers(), 0,
         f"{EXPECTED}: no workers"),
        (ScalingPolicy(prewarm=True, min_workers=2), Demand(queued=0, running=0, expected=EXPECTED), Workers(), 2,
         f"{EXPECTED}: 2 workers (min_workers)"),
        (ScalingPolicy(prewarm=True), Demand(queued=1, running=0, expected=EXPECTED), Workers(), 1,
         "1 queued, 0 running: 1 worker"),
        (ScalingPolicy(prewarm=True), Demand(queued=0, running=0, idle_s=60), Workers(1, idle=1), 0,
         "idle for 60 s of 60 s: no workers"),
        (ScalingPolicy(), Demand(queued=0, running=0, expected=EXPECTED), Workers(), 0, "no calls: no workers"),
    ],
)  # fmt: skip
def test_a_worker_is_wanted_while_a_call_is_expected(
    policy: ScalingPolicy, demand: Demand, workers: Workers, count: int, reason: str
) -> None:
    decision = decide(policy, demand, workers)
    assert (decision.count, decision.reason) == (count, reason)
