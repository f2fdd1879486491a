"""A gang starts, counts, fails and ends as one worker."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.domain.worker import Assignment, Exit, Gang, Rank, StartFailure, WorkerState
from gpufn_core.errors import ErrorInfo, WorkerLost
from gpufn_core.protocol.reports import NodeReport, RunnerReport, WorkerEvent, WorkerEventKind, WorkerReport
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import Action, Delete, Drain, Start
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.gang import PORTS, new_gang
from gpufn_gateway.controller.state.world import World
from tests.gateway.controller.simulation import GIB, cpu, function, node, revision


def gang_world(*names: str, scaling: ScalingPolicy | None = None, nodes: int = 2) -> World:
    """Return a world with a function `f` on two nodes each, at 100 s."""
    made = World(100.0)
    made.on_revision(("f", 1), revision("f", 1, scaling, Resources(nodes=nodes, memory_bytes=5 * GIB)))
    made.on_function("f", function("f"))
    report(made, 100.0, *names)
    return made


def report(world: World, now: float, *names: str, calls: int = 0) -> None:
    for name in names:
        world.on_node_report(joinable(name), now)
        world.on_runner_report(RunnerReport(name, f"r-{name}", now, ready_on(world, name)), now)
    world.on_depths({("f", 1): calls} if calls else {}, now, now)


def ready_on(world: World, name: str) -> tuple[WorkerReport, ...]:
    return tuple(
        WorkerReport(worker, "f", 1, WorkerState.READY, 1, idle_since=0.0)
        for worker, view in world.workers.items()
        if view.assignment.node == name and not view.assignment.rank
    )


def joinable(name: str) -> NodeReport:
    return msgspec.structs.replace(node(name, cpu(memory_bytes=8 * GIB)), address="10.0.0.1")


def start(world: World, *nodes: str, prefix: str = "w") -> list[str]:
    """Assign a gang to nodes; returns its workers by rank."""
    ranks = tuple(Rank(f"{prefix}{number}", name) for number, name in enumerate(nodes))
    gang = new_gang(world, ranks)
    share = DeviceShare("cpu", 0.1, 5 * GIB)
    for rank in ranks:
        assignment = Assignment(
            worker=rank.worker,
            node=rank.node,
            function="f",
            revision=1,
            share=share,
            epoch=1,
            created_at=0.0,
            gang=gang,
        )
        world.on_assignment(rank.worker, assignment, 100.0, version=1)
    return [rank.worker for rank in ranks]


def drained(world: World, now: float) -> set[str]:
    return {action.worker for action in plan(world, now).actions if isinstance(action, Drain)}


def started(actions: tuple[Action, ...]) -> list[list[str]]:
    return [[action.node, *(each.node for each in action.others)] for action in actions if isinstance(action, Start)]


def test_one_call_starts_one_gang_on_two_nodes_and_the_next_finds_no_node_left() -> None:
    empty = gang_world("a", "b", "c")
    report(empty, 100.0, "a", "b", "c", calls=1)
    assert started(plan(empty, 100.0).actions) == [["a", "b"]]
    start(empty, "a", "b")
    report(empty, 101.0, "a", "b", "c", calls=3)
    planned = plan(empty, 101.0)
    assert started(planned.actions) == []
    assert (planned.statuses["f"].workers.ready, "a, b" in planned.statuses["f"].reason) == (1, True)


def test_a_cluster_with_too_few_nodes_starts_nothing_and_reports_the_missing_number() -> None:
    small = gang_world("a", nodes=2)
    report(small, 100.0, "a", calls=1)
    planned = plan(small, 100.0)
    assert planned.actions == ()
    waiting = planned.statuses["f"].waiting
    assert waiting is not None
    assert (waiting.reason, "2 nodes" in waiting.detail, "1 is up" in waiting.detail) == ("no_capacity", True, True)


def test_min_and_max_workers_count_gangs() -> None:
    busy = gang_world("a", "b", "c", "d", "e", "f", scaling=ScalingPolicy(min_workers=2, max_workers=2))
    start(busy, "a", "b")
    report(busy, 100.0, "a", "b", "c", "d", "e", "f", calls=9)
    planned = plan(busy, 100.0)
    assert started(planned.actions) == [["c", "d"]]
    assert planned.statuses["f"].workers.ready == 1


def test_scaling_down_drains_all_ranks() -> None:
    idle = gang_world("a", "b")
    workers = start(idle, "a", "b")
    for now in (100.0, 170.0):
        report(idle, now, "a", "b")
    assert drained(idle, 170.0) == set(workers)


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_if_the_assignment_of_a_rank_ends_the_other_ranks_are_drained(ended: int) -> None:
    broken = gang_world("a", "b", "c", scaling=ScalingPolicy(min_workers=1), nodes=3)
    workers = start(broken, "a", "b", "c")
    report(broken, 100.0, "a", "b", "c", calls=1)
    assert drained(broken, 100.0) == set()
    broken.on_assignment(workers.pop(ended), None, 100.5)
    assert drained(broken, 101.0) == set(workers)
    for worker in workers:
        broken.on_assignment(worker, None, 101.5)
    assert broken.gangs() == []


def test_if_a_node_is_lost_the_rank_there_is_deleted_and_the_others_are_drained() -> None:
    world = gang_world("a", "b")
    workers = start(world, "a", "b")
    report(world, 100.0, "a", "b", calls=1)
    report(world, 112.0, "a", calls=1)
    assert plan(world, 112.0).actions == (), "only the agent is away: rank 0 serves, so its other ranks live"
    world.on_runner_report(RunnerReport("a", "r-a", 112.0), 112.0)
    actions = plan(world, 112.0).actions
    assert [type(action) for action in actions] == [Delete, Drain]
    assert [action.worker for action in actions if isinstance(action, (Delete, Drain))] == workers[::-1]


def exited(worker: str, node_: str) -> WorkerEvent:
    return WorkerEvent(WorkerEventKind.EXITED, worker, "f", 1, node_, 0.0, exit=Exit(code=1))


def test_ranks_that_die_at_the_start_are_one_failed_start() -> None:
    world = gang_world("a", "b")
    rank_0, rank_1 = start(world, "a", "b")
    explained = StartFailure("load", ErrorInfo("function_start_failed", "rank 1 on b: ImportError"))
    world.on_event(exited(rank_1, "b"), 101.0)
    unexplained = world.view(("f", 1)).circuit.last_error
    assert unexplained is not None
    assert "rank 1 on b" in unexplained.message
    world.on_event(WorkerEvent(WorkerEventKind.START_FAILED, rank_0, "f", 1, "a", 0.0, failure=explained), 101.1)
    world.on_event(exited(rank_0, "a"), 101.2)
    circuit = world.view(("f", 1)).circuit
    assert circuit.last_error == explained.error
    assert (circuit._failures, world.view(("f", 1)).in_state(WorkerState.STARTING)) == (1, [])


def test_the_exit_of_a_rank_has_more_details_than_the_report_of_rank_0() -> None:
    world = gang_world("a", "b")
    rank_0, rank_1 = start(world, "a", "b")
    lost = StartFailure("join", WorkerLost("rank 1 on b ended").info())
    world.on_event(exited(rank_1, "b"), 101.0)
    world.on_event(WorkerEvent(WorkerEventKind.START_FAILED, rank_0, "f", 1, "a", 0.0, failure=lost), 101.1)
    circuit = world.view(("f", 1)).circuit
    assert circuit.last_error is not None
    assert ("code 1" in circuit.last_error.message, circuit._failures) == (True, 1)


def test_a_rank_that_dies_later_is_no_failed_start() -> None:
    world = gang_world("a", "b")
    rank_0, rank_1 = start(world, "a", "b")
    world.on_event(WorkerEvent(WorkerEventKind.READY, rank_0, "f", 1, "a", 0.0), 101.0)
    world.on_event(exited(rank_1, "b"), 102.0)
    assert world.view(("f", 1)).circuit.last_error is None
    assert drained(world, 102.0) == {rank_0}


def test_an_idle_gang_makes_room_for_another_as_a_whole() -> None:
    world = gang_world("a", "b")
    workers = start(world, "a", "b")
    world.on_revision(("g", 1), revision("g", 1, None, Resources(nodes=2, memory_bytes=6 * GIB)))
    world.on_function("g", function("g"))
    for now in (100.0, 103.0):
        report(world, now, "a", "b")
        world.on_depths({("g", 1): 1}, now, now)
    assert drained(world, 103.0) == set(workers)


def test_an_idle_gang_makes_room_for_a_function_on_one_node() -> None:
    world = gang_world("a", "b")
    workers = start(world, "b", "a")
    world.on_revision(("g", 1), revision("g", 1, None, Resources(memory_bytes=6 * GIB)))
    world.on_function("g", function("g"))
    for now in (100.0, 103.0):
        report(world, now, "a", "b")
        world.on_depths({("g", 1): 1}, now, now)
    assert drained(world, 103.0) == set(workers)


def test_a_busy_gang_makes_no_room() -> None:
    world = gang_world("a", "b")
    start(world, "a", "b")
    world.on_revision(("g", 1), revision("g", 1, None, Resources(nodes=2, memory_bytes=6 * GIB)))
    world.on_function("g", function("g"))
    for now in (100.0, 103.0):
        report(world, now, "a", "b")
        busy = WorkerReport("w0", "f", 1, WorkerState.READY, 1, in_use=1)
        world.on_runner_report(RunnerReport("a", "r-a", now, (busy,)), now)
        world.on_depths({("g", 1): 1, ("f", 1): 1}, now, now)
    assert drained(world, 103.0) == set()


def test_gangs_on_one_node_have_different_ports_in_the_stated_range() -> None:
    world = gang_world("a", "b")
    for number in range(20):
        start(world, "a", "b", prefix=f"w{number}-")
    ports = [gang.port for gang, _ in world.gangs()]
    assert len(set(ports)) == 20
    assert {*ports, *(Gang((), "", port, "").master_port for port in ports)} <= set(range(29400, 30400))
    assert set(ports) <= set(PORTS)
