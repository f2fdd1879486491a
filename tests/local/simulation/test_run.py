"""The simulated GPU: traces, resident workers, and the comparison of orders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from statistics import mean

import pytest

from gpufn_core.domain.devices.gpu_fair_queue import Arrivals
from gpufn_local.simulation.figures import Ended, Figures, figures
from gpufn_local.simulation.gpu import Gpu, Residents
from gpufn_local.simulation.run import compare, play
from gpufn_local.simulation.traces import Call, Function, Load, calls, functions

F, G, H = (Function(f"f{n}", 1.0, 1.0, memory_gib=10.0) for n in (1, 2, 3))


def trace(load: Load) -> list[Call]:
    rng = random.Random(load.seed)
    return calls(functions(load, rng), load, rng)


@pytest.mark.parametrize("bursty", [False, True])
def test_a_trace_has_the_configured_load_and_is_reproducible(bursty: bool) -> None:
    load = Load(seconds=20_000, busy=0.5, bursty=bursty)
    made = trace(load)
    assert sum(call.service_s for call in made) / load.seconds == pytest.approx(0.5, rel=0.1)
    assert [call.at for call in made] == sorted(call.at for call in made)
    assert [(call.function, call.at) for call in made] == [(call.function, call.at) for call in trace(load)]


def test_the_first_function_is_called_as_often_as_zipf_predicts() -> None:
    made = trace(Load(functions=3, seconds=20_000, zipf=1.0))
    counts = [sum(call.function.name == name for call in made) for name in ("f1", "f2", "f3")]
    assert [count / counts[0] for count in counts] == pytest.approx([1, 1 / 2, 1 / 3], rel=0.1)


def test_a_bursty_function_is_called_for_a_while_and_then_not() -> None:
    def longest_gap(load: Load) -> float:
        times = [call.at for call in trace(load) if call.function.name == "f1"]
        return max(after - before for before, after in itertools.pairwise(times))

    assert longest_gap(Load(bursty=True)) > 5 * longest_gap(Load())


def test_only_the_worker_idle_the_longest_makes_room() -> None:
    residents = Residents(Gpu(memory_gib=20.0))
    for function, now in ((F, 0.0), (G, 1.0)):
        residents.take(function, now)
        residents.release(function, now + 0.5)
    assert residents.take(H, 3.0) == H.cold_start_s
    assert ["f1" in residents, "f2" in residents, "f3" in residents] == [False, True, True]


def test_a_worker_that_is_idle_for_the_timeout_has_ended() -> None:
    residents = Residents(Gpu(idle_timeout_s=60.0))
    residents.take(F, 0.0)
    residents.release(F, 1.0)
    assert residents.take(F, 60.5) == 0.0
    residents.release(F, 61.0)
    assert residents.take(F, 121.0) == F.cold_start_s
    assert residents.cold_starts == 2


def test_the_evicted_worker_is_parked_while_the_host_has_memory_and_then_the_least_worth_ends() -> None:
    residents = Residents(Gpu(memory_gib=10.0, park_gib=20.0))
    now = 0.0

    def call(function: Function) -> float:
        nonlocal now
        now += 2.0
        wait_s = residents.take(function, now)
        residents.release(function, now + 1.0)
        return wait_s

    assert [call(function) for function in (F, G, F)] == [F.cold_start_s, G.cold_start_s, F.resume_s]
    assert call(H) == H.cold_start_s
    assert call(F) == F.resume_s  # H is parked now; for that G ended, which was used once, while F was used twice
    assert call(H) == H.resume_s
    assert call(G) == G.cold_start_s
    assert (residents.cold_starts, residents.resumes) == (4, 3)


def test_a_cold_start_is_part_of_the_turn() -> None:
    made = [Call(F, 0.0, 1.0), Call(F, 0.5, 1.0)]
    found = play(made, Arrivals(), Residents(Gpu()))
    assert found.mean_s == pytest.approx(F.cold_start_s + (1.0 + 1.5) / 2)
    assert found.slowdown == pytest.approx(found.mean_s)  # each call takes a second
    assert (found.cold_starts, found.resumes) == (1, 0)
    assert found.busy == pytest.approx(1.0)


def test_fairness_compares_the_gpu_time_of_functions_while_they_had_calls() -> None:
    """f1 had its turn for 3 of 4 s and f2 for 1 of 4 s; the time without calls does not count."""
    ended = [
        Ended(Call(F, 0.0, 3.0), 0.0, 3.0),
        Ended(Call(G, 0.0, 1.0), 3.0, 4.0),
        Ended(Call(F, 3.0, 0.5), 4.0, 4.0),
        Ended(Call(G, 100.0, 1.0), 103.0, 104.0),
    ]
    found = figures(ended, cold_starts=0, resumes=0, busy_s=1.0)
    assert found.jain == pytest.approx((3 + 1) ** 2 / (2 * (9 + 1)))
    assert found.max_min == pytest.approx(1 / 3)


@pytest.mark.parametrize("bursty", [False, True])
def test_fair_queueing_has_fewer_cold_starts_and_shorter_waits_than_first_come_first_served(bursty: bool) -> None:
    """And the worst slowdown of a function is less than in both other orders."""
    played = [compare(Load(bursty=bursty, busy=0.6, seed=seed), Gpu()).orders for seed in range(1, 6)]

    def ratio(other: str, figure: Callable[[Figures], float]) -> float:
        return mean(figure(each["mqfq"]) for each in played) / mean(figure(each[other]) for each in played)

    assert ratio("fcfs", lambda each: each.cold_starts) < 0.8
    assert ratio("fcfs", lambda each: each.mean_s) < 0.8
    assert ratio("fcfs", lambda each: each.p50_s) < 0.4
    assert ratio("fcfs", lambda each: each.worst_slowdown) < 0.6
    assert ratio("sjf", lambda each: each.worst_slowdown) < 0.6
    assert ratio("fcfs", lambda each: each.jain) > 1.2
    assert ratio("sjf", lambda each: each.max_min) > 1.5
