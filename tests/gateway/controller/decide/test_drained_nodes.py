"""Drained nodes: they accept no workers, and their workers leave without a gap in service."""

from __future__ import annotations

import pytest

from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.reports import WaitReason
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import Drain, Start
from tests.gateway.controller.simulation import Sim, cpu, gpu, node, revision

ONE_WARM = ScalingPolicy(min_workers=1, idle_timeout_s=600)


def on(sim: Sim, name: str) -> int:
    """Count the workers on a node."""
    return sum(view.assignment.node == name for view in sim.world.workers.values())


def ready(sim: Sim) -> int:
    return sum(view.state is WorkerState.READY for view in sim.world.workers.values())


def two_nodes(scaling: ScalingPolicy = ONE_WARM, **options: float) -> Sim:
    """Return a simulation whose workers start on node `a`, because node `b` joins later."""
    sim = Sim(node("a", cpu(8)), **options)  # type: ignore[arg-type]
    sim.deploy(revision(scaling=scaling))
    sim.call("f")
    sim.run(3)
    sim.nodes = (*sim.nodes, node("b", cpu(8)))
    sim.run(2)
    assert on(sim, "a") >= 1
    return sim


def test_an_idle_worker_leaves_once_its_replacement_is_ready() -> None:
    sim = two_nodes(start_s=3.0)
    sim.world.drained.add("a")
    fewest = []
    sim.run(10, lambda sim: fewest.append(ready(sim)))
    assert (on(sim, "a"), on(sim, "b"), min(fewest)) == (0, 1, 1)
    assert (sim.count(Start), sim.count(Drain)) == (2, 1)
    assert "node a is drained" in [action.reason for action in sim.history if isinstance(action, Drain)]


def test_a_node_under_load_empties_and_every_call_ends() -> None:
    sim = two_nodes(ScalingPolicy(max_workers=8), service_s=0.9)
    sim.run(20, lambda sim: sim.call("f") if int(sim.now * 10) % 3 == 0 else None)
    sim.world.drained.add("a")
    at_drain = sim.count(Start)
    sim.run(20, lambda sim: sim.call("f") if int(sim.now * 10) % 3 == 0 else None)
    assert on(sim, "a") == 0
    assert sim.count(Start) - at_drain <= 8
    sim.run(20)
    assert not sim.queues[("f", 1)]
    assert max(sim.waits[-60:]) < 1.0


def test_the_last_node_that_fits_empties_too_and_the_reason_is_reported() -> None:
    sim = Sim(node("a", cpu(), gpu("g")), node("b", cpu()))
    sim.deploy(revision(scaling=ONE_WARM, resources=Resources(gpu=("L4",))))
    sim.run(3)
    assert on(sim, "a") == 1
    sim.world.drained.add("a")
    sim.run(10)
    assert sim.world.workers == {}
    assert "no node has room: a: it is drained; b: it has no L4 GPU" in sim.statuses["f"].reason
    sim.call("f")
    sim.run(2)
    waiting = sim.statuses["f"].waiting
    assert waiting is not None
    assert (waiting.reason, waiting.detail) == (WaitReason.NO_CAPACITY, "a: it is drained; b: it has no L4 GPU")
    sim.world.drained.clear()
    sim.run(3)
    assert (on(sim, "a"), sim.done["f"]) == (1, 1)


def test_a_worker_leaves_without_a_replacement_when_starts_fail() -> None:
    sim = two_nodes()
    sim.fails = lambda key: True
    sim.world.drained.add("a")
    sim.run(30)
    assert on(sim, "a") == 0


def test_an_idle_worker_that_is_no_longer_wanted_is_not_replaced() -> None:
    sim = two_nodes(ScalingPolicy(idle_timeout_s=8))
    sim.run(8.5)
    sim.world.drained.add("a")
    sim.run(5)
    assert (len(sim.world.workers), sim.count(Start)) == (0, 1)


def test_workers_that_start_or_are_parked_leave_at_once() -> None:
    sim = two_nodes(start_s=30.0, scaling=ScalingPolicy())
    assert [view.state for view in sim.world.workers.values()] == [WorkerState.STARTING]
    sim.world.drained.add("a")
    sim.run(1.5)
    assert {view.assignment.node for view in sim.world.workers.values() if not view.drain_requested} == {"b"}


@pytest.mark.parametrize("drained", [("a",), ("a", "b")])
def test_the_status_names_the_drained_nodes(drained: tuple[str, ...]) -> None:
    sim = two_nodes(start_s=3.0)
    sim.world.drained.update(drained)
    sim.run(1.2)
    assert "1 worker leaves a: drained" in sim.statuses["f"].reason
