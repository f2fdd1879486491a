"""Worlds with known reports."""

from __future__ import annotations

from typing import Any

from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.reports import NodeReport, RevisionTraffic, RunnerReport, WorkerReport
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement, explain
from gpufn_gateway.controller.placement.node_choice import place as place_worker
from gpufn_gateway.controller.placement.request import Requirements
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.world import World
from tests.gateway.controller.simulation import assignment, function, node, revision

_LIMITS = Limits()


def world(workers: int = 0, scaling: ScalingPolicy | None = None, **options: object) -> World:
    """Return a world with a function `f` on node `a`, with READY idle workers and empty queues, at 100 s."""
    made = World(100.0)
    made.on_revision(("f", 1), revision("f", 1, scaling))
    made.on_function("f", function("f", **options))  # type: ignore[arg-type]
    made.on_node_report(node(), 100.0)
    names = [f"w{number}" for number in range(workers)]
    for name in names:
        made.on_assignment(name, assignment(name), 100.0)
    tell(made, 100.0, *names)
    made.on_depths({}, 100.0, 100.0)
    return made


def place(
    resources: Resources, nodes: list[NodeReport], book: LeaseBook, limits: Limits = _LIMITS, **requirements: Any
) -> Placement | NoRoom:
    return place_worker(Requirements(resources, **requirements), nodes, book, limits)


def why_no_room(
    resources: Resources, nodes: list[NodeReport], book: LeaseBook, limits: Limits = _LIMITS, **requirements: Any
) -> str:
    """Return why there is no room, after checking that there is none."""
    result = place(resources, nodes, book, limits, **requirements)
    assert isinstance(result, NoRoom)
    wanted = Requirements(resources, **requirements)
    return explain(wanted, nodes, book, limits, at_any_size=result.at_any_size)


def tell(world: World, now: float, *idle: str, since: float = 0.0, traffic: RevisionTraffic | None = None) -> None:
    workers = tuple(WorkerReport(name, "f", 1, WorkerState.READY, 1, idle_since=since) for name in idle)
    world.on_node_report(node(), now)
    world.on_runner_report(RunnerReport("a", "r", now, workers, () if traffic is None else (traffic,)), now)
