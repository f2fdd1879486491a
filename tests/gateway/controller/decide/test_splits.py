"""The workers of a function whose calls are split between revisions."""

from __future__ import annotations

import pytest

from gpufn_core.domain.durations import bucket_of
from gpufn_core.domain.traffic import HeaderRule, Split
from gpufn_core.protocol.reports import CallCounts, RevisionTraffic
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_gateway.controller.decide.scaling import rollout
from gpufn_gateway.controller.decide.scaling.rollout import Role
from gpufn_gateway.controller.state.split_calls import SplitCalls
from tests.gateway.controller.simulation import Sim, function, revision

EVEN = Split(weights={1: 50, 2: 50}, set_at=1.0)
CANARY = Split(weights={1: 90, 2: 10}, set_at=1.0)


def split_sim(split: Split, scaling: ScalingPolicy) -> Sim:
    sim = Sim()
    for number in (1, 2):
        sim.world.on_revision(("f", number), revision("f", number, scaling))
    sim.world.on_function("f", function("f", 1, traffic=split))
    return sim


def test_each_revision_scales_by_its_own_calls_and_to_zero() -> None:
    sim = split_sim(EVEN, ScalingPolicy(max_workers=10, idle_timeout_s=5, scaledown_window_s=5))
    sim.call("f", 1, 2)
    assert (sim.workers("f", 1), sim.workers("f", 2)) == (0, 1)  # the wakeup names the revision
    sim.run(10, lambda sim: sim.call("f", 1, 1))
    assert sim.workers("f", 1) >= 3
    sim.run(30)
    assert (sim.workers("f"), sim.done["f"]) == (0, 101)


def test_the_revisions_share_max_workers_and_none_of_them_starves() -> None:
    sim = split_sim(EVEN, ScalingPolicy(max_workers=2))
    sim.run(10, lambda sim: sim.call("f", 2, 1))
    assert (sim.workers("f", 1), sim.workers("f", 2)) == (2, 0)

    def both(sim: Sim) -> None:
        sim.call("f", 2, 1)
        sim.call("f", 1, 2)

    sim.run(10, both)
    assert (sim.workers("f", 1), sim.workers("f", 2), sim.most["f"]) == (1, 1, 2)


def test_a_function_with_warm_workers_keeps_one_for_each_weight() -> None:
    sim = split_sim(CANARY, ScalingPolicy(min_workers=2, max_workers=10))
    sim.run(120)
    assert (sim.workers("f", 1), sim.workers("f", 2)) == (2, 1)
    assert [each.workers.ready for each in sim.statuses["f"].revisions] == [2, 1]


def test_a_revision_that_leaves_the_split_finishes_its_calls_and_ends() -> None:
    sim = split_sim(EVEN, ScalingPolicy(max_workers=10))
    sim.call("f", 5, 2)
    sim.run(1)
    sim.world.on_function("f", function("f", 1))
    sim.run(20)
    assert (sim.workers("f", 2), sim.done["f"]) == (0, 5)


def test_a_new_revision_replaces_all_of_a_split() -> None:
    sim = split_sim(EVEN, ScalingPolicy(min_workers=4, max_workers=10))
    sim.run(5)
    assert sim.workers("f") == 4
    sim.world.on_revision(("f", 3), revision("f", 3, ScalingPolicy(max_workers=10)))
    sim.world.on_function("f", function("f", 1, 3, traffic=EVEN))
    sim.run(0.2)
    sim.run(1.2)
    assert sim.workers("f", 3) == 4


@pytest.mark.parametrize(
    ("number", "role"), [(1, Role.SERVING), (2, Role.SPLIT), (3, Role.SPLIT), (4, Role.RETIRED), (5, Role.NEXT)]
)
def test_roles(number: int, role: Role) -> None:
    split = Split(weights={1: 90, 2: 10}, set_at=1.0, headers=(HeaderRule("x-a", "1", 3),))
    assert rollout.role_of(function("f", 1, 5, traffic=split), number) is role


@pytest.mark.parametrize(
    ("wanted", "most", "given"),
    [
        ({1: 3, 2: 1}, 4, {1: 3, 2: 1}),
        ({1: 3, 2: 1}, 3, {1: 2, 2: 1}),
        ({1: 10, 2: 10, 3: 1}, 5, {1: 2, 2: 2, 3: 1}),
        ({1: 100, 2: 1}, 10, {1: 9, 2: 1}),
        ({1: 1, 2: 1, 3: 1}, 2, {1: 1, 2: 1, 3: 0}),
        ({1: 4, 2: 0}, 2, {1: 2, 2: 0}),
        ({1: 4, 2: 4}, 0, {1: 0, 2: 0}),
    ],
)
def test_division(wanted: dict[int, int], most: int, given: dict[int, int]) -> None:
    assert rollout.divide(wanted, most) == given


def test_calls_are_counted_from_the_start_of_a_split_and_in_its_window() -> None:
    calls = SplitCalls()

    def traffic(ended: int, errors: int, seconds: float = 0.1) -> RevisionTraffic:
        durations = {bucket_of(seconds): ended}
        return RevisionTraffic("f", 2, ended=ended, errors=errors, durations=durations)

    calls.on_traffic(None, traffic(7, 7), 0.0)  # not split yet
    calls.on_function("f", function("f", 1, traffic=Split(weights={1: 50, 2: 50}, set_at=1.0, window_s=10.0)))
    calls.on_traffic(traffic(7, 7), traffic(10, 8), 1.0)
    calls.on_traffic(traffic(10, 8), traffic(20, 8), 11.5)
    total, recent = calls.of(("f", 2), 12.0)
    assert (total.calls, total.errors, recent.calls, recent.errors) == (13, 1, 10, 0)
    assert total.p50_s == pytest.approx(0.1, rel=0.05)
    calls.on_function("f", function("f", 1, traffic=Split(weights={1: 50, 2: 50}, set_at=2.0)))
    assert calls.of(("f", 2), 12.0) == (CallCounts(), CallCounts())
