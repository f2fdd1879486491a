"""Worlds with known reports."""

from __future__ import annotations

from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.reports import NodeReport, RevisionTraffic, RunnerReport, WorkerReport
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, explain, place
from gpufn_gateway.controller.placement.request import Wanted
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.world import World
from tests.gateway.controller.simulation import assignment, function, node, revision


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


def why_no_room(
    resources: Resources,
    nodes: list[NodeReport],
    book: LeaseBook,
    limits: Limits | None = None,
    *,
    engine_kinds: frozenset[str] | None = None,
    in_container: bool = False,
) -> str:
    """Return why there is no room, after checking that there is none."""
    limits = limits or Limits()
    found = place(resources, nodes, book, limits, engine_kinds=engine_kinds, in_container=in_container)
    assert isinstance(found, NoRoom)
    wanted = Wanted(resources, engine_kinds, in_container)
    return explain(wanted, nodes, book, limits, of_any_size=found.of_any_size)


def tell(world: World, now: float, *idle: str, since: float = 0.0, traffic: RevisionTraffic | None = None) -> None:
    workers = tuple(WorkerReport(name, "f", 1, WorkerState.READY, 1, idle_since=since) for name in idle)
    world.on_node_report(node(), now)
    world.on_runner_report(RunnerReport("a", "r", now, workers, () if traffic is None else (traffic,)), now)
