"""No incomplete gang survives any death, and no two ranks of a gang share a node."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from gpufn_core.domain.worker import Assignment, Exit, Gang, Rank, WorkerState
from gpufn_core.protocol.reports import NodeReport, RunnerReport, WorkerEvent, WorkerEventKind, WorkerReport
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import Delete, Drain, Start
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.gang import new_gang
from gpufn_gateway.controller.state.world import World
from tests.gateway.controller.decide.test_gangs import joinable
from tests.gateway.controller.simulation import GIB, function, revision

NODES = tuple("abcde")
MOST_GANGS = {1: 10, 2: 5, 3: 2, 4: 2}  # by number of nodes, with two ranks per node; the tightest fit comes first
QUIET_S = 60  # enough to lose a node, drain, and start again


class Cluster:
    """Nodes that follow the plan. When a process of a gang ends, the others end a second later. The processes of a gang
    that was never complete wait for the other ranks until they are drained."""

    def __init__(self, nodes: int, gangs: int, seed: int) -> None:
        self.now = 100.0
        self.random = random.Random(seed)
        self.world = World(self.now)
        scaling = ScalingPolicy(min_workers=gangs, max_workers=gangs)
        self.world.on_revision(("f", 1), revision("f", 1, scaling, Resources(nodes=nodes, memory_bytes=3 * GIB)))
        self.world.on_function("f", function("f"))
        self.up = set(NODES)
        self.running: dict[str, Assignment] = {}
        self.drained: set[str] = set()
        self.waiting: set[str] = set()  # for a rank that was never assigned
        self.fails_to_store = False  # one assignment of the next start

    def step(self) -> None:
        self.now += 1.0
        self._end_broken()
        for node in sorted(self.up):
            self.world.on_node_report(self._report(node), self.now)
            self.world.on_runner_report(RunnerReport(node, f"r-{node}", self.now, self._ready_on(node)), self.now)
        self.world.on_depths({}, self.now, self.now)
        for action in plan(self.world, self.now).actions:
            match action:
                case Start():
                    self._start(action)
                case Drain():
                    self.drained.add(action.worker)
                case Delete():
                    self.world.on_assignment(action.worker, None, self.now)

    def kill(self) -> None:
        if self.running:
            self._exit(self.random.choice(sorted(self.running)))

    def unplug(self) -> None:
        if len(self.up) > 1:
            node = self.random.choice(sorted(self.up))
            self.up.remove(node)
            for worker in [name for name, each in self.running.items() if each.node == node]:
                del self.running[worker]  # it ends by itself: no event, and its assignment stays

    def fail_to_store(self) -> None:
        self.fails_to_store = True

    def plug_in(self) -> None:
        self.up = set(NODES)
        for worker, view in list(self.world.workers.items()):
            if worker not in self.running:
                self.world.on_assignment(view.assignment.worker, None, self.now)

    def _start(self, action: Start) -> None:
        places = [(action.node, action.share), *((each.node, each.share) for each in action.others)]
        assert len({node for node, _ in places}) == len(places)
        assert {node for node, _ in places} <= {name for name, node in self.world.nodes.items() if node.offer}
        ranks = tuple(Rank(f"w{self.random.random()}", node) for node, _ in places)
        gang = new_gang(self.world, ranks) if len(ranks) > 1 else None
        for rank, (node, share) in zip(ranks, places, strict=True):
            assignment = Assignment(
                worker=rank.worker, node=node, function="f", revision=1, share=share, epoch=1, created_at=0.0, gang=gang
            )
            self.world.on_assignment(rank.worker, assignment, self.now, version=1)
            if node in self.up:
                self.running[rank.worker] = assignment
        if self.fails_to_store:
            self.fails_to_store = False
            lost = self.random.choice(ranks).worker
            self.world.on_assignment(lost, None, self.now)
            self.running.pop(lost, None)
            self.waiting |= {rank.worker for rank in ranks}

    def _end_broken(self) -> None:
        for worker, assignment in list(self.running.items()):
            gang = assignment.gang or Gang((Rank(worker, assignment.node),), "", 0, "")
            is_whole = worker in self.waiting or all(rank.worker in self.running for rank in gang.ranks)
            if worker in self.drained or not is_whole:
                self._exit(worker)

    def _exit(self, worker: str) -> None:
        assignment = self.running.pop(worker)
        exited = WorkerEvent(WorkerEventKind.EXITED, worker, "f", 1, assignment.node, self.now, exit=Exit(code=0))
        self.world.on_event(exited, self.now)
        if self.random.random() < 0.5:  # else its assignment is deleted later
            self.world.on_assignment(worker, None, self.now)

    def _report(self, node: str) -> NodeReport:
        for worker, view in list(self.world.workers.items()):
            if view.assignment.node == node and worker not in self.running and view.is_gone:
                self.world.on_assignment(worker, None, self.now)
        return joinable(node)

    def _ready_on(self, node: str) -> tuple[WorkerReport, ...]:
        return tuple(
            WorkerReport(worker, "f", 1, WorkerState.READY, 1, idle_since=0.0)
            for worker, assignment in self.running.items()
            if assignment.node == node and not assignment.rank and worker not in self.waiting
        )


@settings(max_examples=60)
@given(
    nodes=st.integers(1, 4),
    gangs=st.integers(1, 3),
    seed=st.integers(0, 1 << 16),
    events=st.lists(st.sampled_from(["step", "step", "kill", "unplug", "plug_in", "fail_to_store"]), max_size=40),
)
def test_no_half_gang_stays(nodes: int, gangs: int, seed: int, events: list[str]) -> None:
    cluster = Cluster(nodes, gangs, seed)
    for event in events:
        getattr(cluster, event)()
        for node in NODES:  # no node is leased twice over
            assert cluster.world.leases.used(node).memory_bytes <= 8 * GIB
    cluster.plug_in()
    for _ in range(QUIET_S):
        cluster.step()
    ready = [each for each in cluster.running.values() if not each.rank]
    assert len(ready) >= min(gangs, MOST_GANGS[nodes]), "ended processes start again"
    for gang, processes in cluster.world.gangs():
        assert len(processes) == len(gang.ranks) == nodes
        assert all(rank.worker in cluster.running for rank in gang.ranks)
    assert len(cluster.world.view(("f", 1)).workers) == len(ready)
