"""Room for who waits: what is granted in this step, and which workers of others go, or park, to make more. Pure.

Who waits gets a parked worker of its own back, where that one's share is free; else a share for a new one.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from gpufn.protocol.reports import NodeReport
from gpufn.revision import RevisionKey
from gpufn.workers import ParkedMemory, WorkerState

from . import policy
from .actions import Need
from .leases import LeaseBook
from .leaving import Leaving, idle_longest_first
from .limits import Limits
from .placement import NoRoom, Placement, place, returns
from .views import WorkerView
from .world import World

SETTLE_S = 0.2  # a worker that has just become idle may have its next call on the way


class Return(msgspec.Struct, frozen=True):
    """A parked worker, on its own node."""

    worker: WorkerView


class Room:
    """The leases as they are once this step is done."""

    def __init__(self, world: World, now: float, limits: Limits, leaving: Leaving) -> None:
        self._world = world
        self._now = now
        self._limits = limits
        self._leaving = leaving
        self._book = world.leases.copy()
        self._granted = 0
        self._returned: set[str] = set()
        self._parked: dict[RevisionKey, list[WorkerView]] = {}  # of revisions that were asked about

    def grant(self, need: Need, nodes: list[NodeReport]) -> Return | Placement | NoRoom:
        """A parked worker that resumes, or a share for one that starts now, on one of `nodes`."""
        found = self._find(need, nodes, self._book, explain=True)
        self._take(found)
        return found

    def _take(self, found: Return | Placement | NoRoom) -> None:
        if isinstance(found, Placement):
            self._granted += 1
            self._book.grant(f"new-{self._granted}", found.node, found.share)
        elif isinstance(found, Return):
            assignment = found.worker.assignment
            self._returned.add(assignment.worker)
            self._book.grant(assignment.worker, assignment.node, assignment.share)

    def count_what_leaves(self) -> None:
        """What is already on its way out is room to come, first for those who wait for it."""
        for worker in self._world.workers.values():
            assignment = worker.assignment
            if worker.state is WorkerState.PARKING and assignment.worker not in self._returned:
                expected = ParkedMemory(self._world.view(worker.key).parked_bytes or 0)
                self._book.grant(assignment.worker, assignment.node, assignment.share, expected)
            elif worker.state in (WorkerState.DRAINING, WorkerState.FAILED) or worker in self._leaving:
                self._book.release(assignment.worker)

    def claim(self, need: Need) -> bool:
        found = self._find(need, self._world.reports(self._now), self._book)
        self._take(found)
        return not isinstance(found, NoRoom)

    def evict_for(self, need: Need, candidates: list[WorkerView]) -> bool:
        """Park or drain the first of `candidates` whose going makes room, and no more than needed."""
        reports = self._world.reports(self._now)
        trial = self._book.copy()
        gone: list[WorkerView] = []
        found: Return | Placement | NoRoom = NoRoom()
        for worker in candidates:
            if worker in self._leaving or not self._can_spare(worker, need, gone):
                continue
            trial.release(worker.assignment.worker)
            gone.append(worker)
            found = self._find(need, reports, trial)
            if not isinstance(found, NoRoom):
                break
        if isinstance(found, NoRoom):
            return False
        for victim in gone:
            # Without those whose going did not help: they are on other nodes, or too small.
            lease = victim.assignment
            trial.grant(lease.worker, lease.node, lease.share, victim.parked)
            if not isinstance(self._find(need, reports, trial), NoRoom):
                continue
            reason = f"makes room for {need.key[0]}, which has calls and no room"
            held = self._leaving.would_hold(victim)
            if held is not None:
                trial.grant(lease.worker, lease.node, lease.share, held)
                if not isinstance(self._find(need, reports, trial), NoRoom) and self._leaving.park(victim, reason):
                    continue
            trial.release(lease.worker)
            self._leaving.drain(victim, reason)
        self._book = trial
        return self.claim(need)

    def parked_workers(self) -> list[WorkerView]:
        """Those that nobody wants back now, the least worth first."""
        parked = [worker for worker in self._world.workers.values() if worker.state is WorkerState.PARKED]
        return sorted((worker for worker in parked if not self._has_calls(worker)), key=self._worth)

    def _worth(self, worker: WorkerView) -> tuple[float, str]:
        name = worker.assignment.worker
        return self._world.holdings.host_memory(worker.assignment.node).worth(name), name

    def idle_workers(self) -> list[WorkerView]:
        """And those that start, and that nobody waits for any more."""
        found: list[WorkerView] = []
        for worker in self._world.workers.values():
            if worker in self._leaving:
                continue
            if worker.state is WorkerState.STARTING:
                idle_s = None if self._is_next(worker) else self._now - worker.since
            elif worker.state is WorkerState.READY:
                idle_s = self._world.idle_for(worker, self._now)
            else:
                continue
            if idle_s is not None and idle_s >= SETTLE_S and not self._has_calls(worker):
                found.append(worker)
        return sorted(found, key=lambda worker: idle_longest_first(self._world, worker, self._now))

    def _is_next(self, worker: WorkerView) -> bool:
        """Calls go to its revision when it has started."""
        function = self._world.functions.get(worker.key[0])
        return function is not None and worker.key[1] == function.active != function.serving

    def surplus_of_others(self, need: Need) -> list[WorkerView]:
        """READY workers of functions that have several, from who has most; they finish what they run."""
        found: list[tuple[int, str, WorkerView]] = []
        for key, ready in self._ready.items():
            is_same = key[0] == need.key[0]
            if key == need.key or (len(ready) < 2 and not is_same) or (is_same and need.is_failing):
                continue
            found += [(-len(ready), worker.assignment.worker, worker) for worker in ready[: None if is_same else -1]]
        return [worker for *_, worker in sorted(found, key=lambda entry: entry[:2])]

    @cached_property
    def _ready(self) -> dict[RevisionKey, list[WorkerView]]:
        """Once a step: hundreds of functions may wait on a node that has room for a few."""
        ready = {key: view.in_state(WorkerState.READY) for key, view in self._world.views.items()}
        return {key: workers for key, workers in ready.items() if workers}

    def _has_calls(self, worker: WorkerView) -> bool:
        return self._world.calls(worker.key, self._now) != 0 or self._world.depths.has_rung(worker.key[0])

    def _find(
        self, need: Need, nodes: list[NodeReport], book: LeaseBook, *, explain: bool = False
    ) -> Return | Placement | NoRoom:
        for worker in self._may_return(need):
            if self._returns(worker, need, book):
                return Return(worker)
        return self._place(need, nodes, book, explain=explain)

    def _may_return(self, need: Need) -> list[WorkerView]:
        """Those that still park first, for they have their share; then who was used last."""
        found = self._parked.get(need.key)
        if found is None:  # once a step: a thousand workers may be wanted of one function
            found = need.view.in_state(WorkerState.PARKING, WorkerState.PARKED)
            found.sort(key=lambda each: (each.parked is not None, self._world.idle_for(each, self._now) or 0.0))
            self._parked[need.key] = found
        return [each for each in found if each.assignment.worker not in self._returned | self._leaving.names]

    def _returns(self, worker: WorkerView, need: Need, book: LeaseBook) -> bool:
        assignment = worker.assignment
        if worker.state is WorkerState.PARKING:
            return True
        report = next((each for each in self._world.reports(self._now) if each.node == assignment.node), None)
        if report is None:
            return False
        book.release(assignment.worker)
        used = book.used(assignment.node)
        book.grant(assignment.worker, assignment.node, assignment.share, worker.parked)
        return returns(need.revision.spec.resources, assignment.share, report, used, self._limits)

    def _place(
        self, need: Need, nodes: list[NodeReport], book: LeaseBook, *, explain: bool = False
    ) -> Placement | NoRoom:
        revision = need.revision
        return place(
            revision.spec.resources,
            nodes,
            book,
            self._limits,
            engine_kinds=revision.device_kinds,
            in_container=revision.spec.image is not None,
            explain=explain,
        )

    def _can_spare(self, worker: WorkerView, need: Need, gone: list[WorkerView]) -> bool:
        """min_workers hold against others as well; a revision that is being replaced has none, and no worker that is
        parked is one of them. Nor do they hold, while they are idle, against calls that came before they served: those
        would wait for ever."""
        function = self._world.functions.get(worker.key[0])
        record = self._world.revisions.get(worker.key)
        if worker.state is WorkerState.PARKED or function is None or record is None:
            return True
        if worker.key[1] != function.active:
            return True
        is_before_it = need.key[0] == function.name and need.key[1] != function.serving
        if is_before_it and self._world.idle_for(worker, self._now) is not None:
            return True
        view = self._world.view(worker.key)
        leaving = self._leaving.names | {other.assignment.worker for other in gone}
        beside = [WorkerState.READY] if worker.state is WorkerState.READY else [WorkerState.READY, worker.state]
        left = sum(other.assignment.worker not in leaving for other in view.in_state(*beside)) - 1
        return left >= policy.effective(record.spec.scaling, function).min_workers
