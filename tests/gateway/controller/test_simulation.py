from __future__ import annotations

from collections.abc import Callable

import pytest

from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import Drain, EndQueued, MoveServing, Start
from gpufn_gateway.controller.limits import Limits
from tests.gateway.controller.simulation import Sim, cpu, gpu, node, revision

WHOLE_CORE = Resources(cpu=1.0)
NO_OVERSUBSCRIPTION = Limits(cpu_oversubscription=1.0)


def test_one_call_starts_one_worker_and_after_the_idle_timeout_there_is_none() -> None:
    sim = Sim()
    sim.deploy(revision(scaling=ScalingPolicy(idle_timeout_s=5)))
    sim.run(3)
    assert sim.workers("f") == 0
    sim.call("f")
    assert sim.workers("f") == 1  # at once, no tick in between
    sim.run(4)
    assert (sim.done, sim.most, sim.workers("f")) == ({"f": 1}, {"f": 1}, 1)
    sim.run(5)
    assert sim.workers("f") == 0
    assert "idle for" in next(action.reason for action in sim.history if isinstance(action, Drain))


def test_one_long_call_is_not_a_reason_for_a_second_worker() -> None:
    sim = Sim(service_s=8.0)
    sim.deploy(revision())
    for _ in range(3):
        sim.call("f")
        sim.run(20)
    assert sim.most == {"f": 1}


def test_traffic_scales_up_flows_and_scales_to_zero() -> None:
    sim = Sim(node("a", cpu(8)))
    sim.deploy(revision(scaling=ScalingPolicy(max_workers=10, idle_timeout_s=10, scaledown_window_s=10)))
    sim.run(60, lambda sim: sim.call("f"))  # 10 calls/s of 0.4 s: 4 at a time, 6 workers at 70 %
    assert 5 <= sim.workers("f") <= 10
    assert sim.done["f"] > 590
    last = sorted(sim.waits[-100:])
    assert last[98] <= 0.2
    sim.run(120)
    assert sim.workers("f") == 0
    assert sim.done["f"] == 600


def test_flapping_traffic_does_not_flap_workers() -> None:
    sim = Sim(node("a", cpu(8)))
    sim.deploy(revision(scaling=ScalingPolicy(max_workers=8, scaledown_window_s=30)))

    def bursts(sim: Sim) -> None:
        if int(sim.now * 10) % 100 == 0:  # 20 calls every 10 s
            sim.call("f", 20)

    sim.run(60, bursts)
    started = sim.count(Start)
    sim.run(300, bursts)
    assert sim.count(Start) == started
    assert sim.count(Drain) == 0


def test_fifty_functions_on_two_cores_are_all_served() -> None:
    sim = Sim(limits=NO_OVERSUBSCRIPTION, service_s=0.1, start_s=0.1)  # room for two workers
    names = [f"f{number:02}" for number in range(50)]
    for name in names:
        sim.deploy(revision(name, resources=WHOLE_CORE))
    for name in names:
        sim.call(name)
    assert {sim.statuses[name].waiting.reason for name in names[2:]} == {"no_capacity"}  # type: ignore[union-attr]
    sim.run(50)
    assert sim.done == dict.fromkeys(names, 1)
    assert len(sim.world.workers) == 2


def test_the_worker_that_was_idle_longest_makes_room() -> None:
    sim = Sim(limits=NO_OVERSUBSCRIPTION)
    for name in ("old", "young", "new"):
        sim.deploy(revision(name, resources=WHOLE_CORE))
    sim.call("old")
    sim.run(3)
    sim.call("young")
    sim.run(3)
    sim.call("new")
    sim.run(2)
    assert (sim.workers("old"), sim.workers("young"), sim.workers("new")) == (0, 1, 1)


def test_a_function_without_workers_gets_one_from_a_function_that_keeps_all_of_them_busy() -> None:
    sim = Sim(limits=NO_OVERSUBSCRIPTION)
    sim.deploy(revision("hog", resources=WHOLE_CORE))
    sim.deploy(revision("late", resources=WHOLE_CORE))

    def traffic(sim: Sim) -> None:
        if len(sim.queues.get(("hog", 1), [])) < 20:
            sim.call("hog")

    sim.run(10, traffic)
    assert sim.workers("hog") == 2
    sim.call("late")
    sim.run(10, traffic)
    assert sim.done["late"] == 1


def test_a_deploy_brings_up_as_many_new_workers_as_are_needed_before_the_old_ones_go() -> None:
    sim = Sim(node("a", cpu(8)))
    sim.deploy(revision(scaling=ScalingPolicy(min_workers=3)))
    sim.run(5)
    sim.deploy(revision(number=2, scaling=ScalingPolicy(min_workers=3)))
    ready: list[int] = []

    def look(sim: Sim) -> None:
        ready.append(sim.workers("f") - len(sim.starting))

    sim.run(5, look)
    assert min(ready) >= 3
    assert sim.world.functions["f"].serving == 2
    assert (sim.workers("f", 1), sim.workers("f", 2)) == (0, 3)


def _keep_calling(calls: int) -> Callable[[Sim], None]:
    """Return a client that always has this many calls of `f` in flight."""

    def call(sim: Sim) -> None:
        under_way = sum(map(len, sim.queues.values())) + len(sim.running)
        sim.call("f", max(0, calls - under_way))

    return call


@pytest.mark.parametrize("most", [1, 2])
def test_a_rollout_to_fewer_workers_than_are_busy_completes(most: int) -> None:
    sim = Sim(node("a", cpu(8)))
    sim.deploy(revision(scaling=ScalingPolicy(max_workers=4)))
    sim.run(20, _keep_calling(8))
    sim.deploy(revision(number=2, scaling=ScalingPolicy(max_workers=most)))
    sim.history.clear()
    sim.run(10, _keep_calling(8))
    kinds = [type(action) for action in sim.history]
    assert kinds[: most + 1] == [Start] * most + [MoveServing], "the old ones take calls until the new ones can"
    assert (sim.workers("f", 1), sim.workers("f", 2), sim.most["f"]) == (0, most, 4 + most)


@pytest.mark.parametrize("gpus", [3, 8])
def test_on_full_gpus_a_rollout_uses_place_after_place_and_returns_none(gpus: int) -> None:
    sim = Sim(node("a", cpu(64), *(gpu(f"GPU-{number}") for number in range(gpus))), start_s=1.0)
    wants_gpu = Resources(gpu=("any",))
    scaling = ScalingPolicy(max_workers=gpus)
    sim.deploy(revision(scaling=scaling, resources=wants_gpu))
    sim.run(30, _keep_calling(2 * gpus))
    sim.deploy(revision(number=2, scaling=scaling, resources=wants_gpu))
    sim.history.clear()
    sim.run(30, _keep_calling(2 * gpus))
    assert (sim.workers("f", 1), sim.workers("f", 2)) == (0, gpus)
    assert (sim.count(Drain), sim.count(Start), sim.count(MoveServing)) == (gpus, gpus, 1)


def test_a_retired_revision_finishes_its_queue() -> None:
    sim = Sim(service_s=2.0)
    sim.deploy(revision(scaling=ScalingPolicy(max_workers=1)))
    sim.call("f", 5)
    sim.run(1)
    sim.deploy(revision(number=2))
    sim.run(30)
    assert sim.world.functions["f"].serving == 2
    assert sim.done["f"] == 5
    assert sim.workers("f", 1) == 0


@pytest.mark.parametrize("least", [0, 1])
def test_on_a_single_gpu_the_queue_of_the_old_revision_runs_before_the_new_one_is_kept_warm(least: int) -> None:
    sim = Sim(node("a", cpu(), gpu("g0")), service_s=3.0)
    scaling = ScalingPolicy(min_workers=least, max_workers=1)
    for number in (1, 2):
        sim.deploy(revision(number=number, scaling=scaling, resources=Resources(gpu=("any",))))
        sim.call("f", 5 * (2 - number))
        sim.run(4)
    sim.run(40)
    assert (sim.world.functions["f"].serving, sim.done["f"]) == (2, 5)
    assert (sim.workers("f", 1), sim.workers("f", 2)) == (0, least)


def test_a_revision_that_cannot_start_gets_no_calls_and_reports_the_reason() -> None:
    sim = Sim(fails=lambda key: key[1] == 2)
    sim.deploy(revision(scaling=ScalingPolicy(min_workers=1)))
    sim.run(3)
    sim.deploy(revision(number=2, scaling=ScalingPolicy(min_workers=1)))
    sim.run(60)
    sim.call("f")
    sim.run(2)
    assert sim.world.functions["f"].serving == 1
    assert sim.done["f"] == 1
    assert "fail to start" in sim.statuses["f"].reason
    assert sim.count(Start) <= 1 + 3 + 4  # three failures, then one attempt after 5, 10, 20 s


def test_calls_of_a_function_that_cannot_start_end_at_the_second_opening() -> None:
    sim = Sim(fails=lambda key: True)
    sim.deploy(revision())
    sim.call("f")
    sim.run(4)
    status = sim.statuses["f"]
    assert status.start_error is not None
    assert status.waiting is not None
    assert (status.waiting.reason, "nope" in status.waiting.detail) == ("crash_looping", True)
    assert sim.count(EndQueued) == 0
    sim.run(10)
    assert sim.count(EndQueued) == 1
    starts = sim.count(Start)
    sim.run(100)
    assert sim.count(Start) == starts  # no calls any more


def test_calls_stay_with_the_old_revision_while_the_new_one_fails_to_start_with_an_error() -> None:
    sim = Sim(fails=lambda key: key == ("f", 2))
    sim.deploy(revision(scaling=ScalingPolicy(min_workers=1)))
    sim.run(3)
    sim.deploy(revision(number=2, scaling=ScalingPolicy(min_workers=1)))
    sim.run(10)
    assert (sim.count(MoveServing), sim.workers("f", 1)) == (0, 1)
    status = sim.statuses["f"]
    assert (status.serving, status.workers.ready, status.start_error) == (1, 1, None)
    assert status.next is not None
    assert (status.next.revision, status.next.start_error) == (2, sim.world.view(("f", 2)).circuit.last_error)
    assert all(fact in status.reason for fact in ("revision 2", "ImportError", "nope"))


def test_on_a_single_gpu_the_old_revision_yields_to_the_new_one() -> None:
    wants_gpu = Resources(gpu=("L4",))
    sim = Sim(node("a", cpu(), gpu("g0")))
    sim.deploy(revision(resources=wants_gpu, scaling=ScalingPolicy(min_workers=1)))
    sim.run(3)
    sim.deploy(revision(number=2, resources=wants_gpu, scaling=ScalingPolicy(min_workers=1)))
    sim.run(10)
    assert sim.count(MoveServing) == 1
    assert (sim.workers("f", 1), sim.workers("f", 2)) == (0, 1)


def test_a_deleted_functions_workers_and_calls_go() -> None:
    sim = Sim(service_s=0.5)
    sim.deploy(revision(scaling=ScalingPolicy(max_workers=1)))
    sim.call("f", 50)
    sim.run(3)
    sim.world.on_function("f", None)
    sim.run(6)
    assert sim.world.workers == {}
    assert not sim.queues.get(("f", 1))
    assert sim.count(EndQueued) >= 1


def test_on_a_single_gpu_a_new_revision_that_cannot_start_returns_the_place_and_calls_continue() -> None:
    wants_gpu = Resources(gpu=("L4",))
    sim = Sim(node("a", cpu(), gpu("g0")), fails=lambda key: key == ("f", 2))
    for number in (1, 2):
        sim.deploy(revision(number=number, resources=wants_gpu, scaling=ScalingPolicy(min_workers=1)))
        sim.run(3)
    assert (sim.count(MoveServing), sim.workers("f", 1), sim.workers("f", 2)) == (0, 1, 0)
    assert all(fact in sim.statuses["f"].reason for fact in ("revision 2", "ImportError", "nope"))

    def one_call_a_second(sim: Sim) -> None:
        if int(sim.now * 10) % 10 == 0:
            sim.call("f")

    sim.run(400, one_call_a_second)
    assert sim.done["f"] >= 399
    assert sim.count(Start) <= 4, "a revision with calls keeps its GPU; the new one is not tried again"
    assert sim.statuses["f"].serving == 1


def test_on_a_single_gpu_a_revision_that_failed_to_start_is_retried_when_the_old_one_has_no_calls() -> None:
    wants_gpu = Resources(gpu=("L4",))
    broken = True
    sim = Sim(node("a", cpu(), gpu("g0")), fails=lambda key: broken and key == ("f", 2))
    for number in (1, 2):
        sim.deploy(revision(number=number, resources=wants_gpu, scaling=ScalingPolicy(min_workers=1)))
        sim.run(3)
    sim.run(60)
    tries = sim.count(Start)
    assert 6 <= tries <= 10, "after 5, 10, 20 s idle, each time with the old one in between"
    broken = False
    sim.run(120)
    assert (sim.count(MoveServing), sim.workers("f", 1), sim.workers("f", 2)) == (1, 0, 1)


def test_a_call_precedes_another_try_of_a_revision_that_fails_to_start() -> None:
    wants_gpu = Resources(gpu=("L4",))
    sim = Sim(node("a", cpu(), gpu("g0")), fails=lambda key: key == ("f", 2), start_s=2.0)
    sim.deploy(revision(resources=wants_gpu, scaling=ScalingPolicy(idle_timeout_s=600)))
    sim.call("f")
    sim.run(5)
    sim.deploy(revision(number=2, resources=wants_gpu))
    sim.run(20)
    assert sim.world.functions["f"].serving == 1
    sim.call("f")
    sim.run(8)
    assert sim.done["f"] == 2
