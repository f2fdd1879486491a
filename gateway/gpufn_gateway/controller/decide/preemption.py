"""Room for who waits: what is granted in this step, and which workers of others go, or park, to make more. Pure.

Who waits gets a parked worker of its own back, where that one's share is free; else a share for a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import cached_property

import msgspec

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import ParkedMemory, WorkerState
from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.controller.decide import policy
from gpufn_gateway.controller.decide.actions import Need
from gpufn_gateway.controller.decide.scale_down import Leaving, idle_longest_first
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement, explain, place, returns
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.views import WorkerView
from gpufn_gateway.controller.state.world import World

SETTLE_S = 0.2  # a worker that has just become idle may have its next call on the way


class Return(msgspec.Struct, frozen=True):
    """A parked worker, on its own node."""

    worker: WorkerView


class Room:
    """The leases as they are once this step is done.

    Hundreds of functions may wait for what a thousand nodes do not have. So each kind of request is looked for once:
    that there is no room for it stays true until a lease ends, for what is granted meanwhile makes no room.
    """

    def __init__(self, world: World, now: float, limits: Limits, leaving: Leaving) -> None:
        self._world = world
        self._now = now
        self._limits = limits
        self._leaving = leaving
        self._book = world.leases.copy()
        self.reports = world.reports(now)
        self._by_node = {report.node: report for report in self.reports}
        self._no_room: set[Hashable] = set()  # `Wanted`, or its `of_any_size`
        self._of_any_size: set[Hashable] = set()  # no room for any size, when `_start` looked
        self._fits_empty: dict[Hashable, bool] = {}
        self._not_made: set[Hashable] = set()  # nobody's going makes room for it
        self._granted = 0
        self._returned: set[str] = set()
        self._parked: dict[RevisionKey, list[WorkerView]] = {}  # of revisions that were asked about

    def grant(self, need: Need, nodes: list[NodeReport]) -> Return | Placement | NoRoom:
        """A parked worker that resumes, or a share for one that starts now, on one of `nodes`."""
        found = self._find_once(need, nodes)
        if isinstance(found, NoRoom) and found.of_any_size and len(nodes) == len(self.reports):
            self._of_any_size.add(need.wanted.of_any_size)
        self._take(found)
        return found

    def explained_as(self, need: Need) -> Hashable:
        """The same for all needs that have no room for the same reason."""
        any_size = need.wanted.of_any_size
        return any_size if any_size in self._of_any_size else need.wanted

    def explain(self, need: Need) -> str:
        any_size = need.wanted.of_any_size in self._of_any_size
        return explain(need.wanted, self.reports, self._book, self._limits, of_any_size=any_size)

    def fits_when_empty(self, need: Need) -> bool:
        """Whether a node would have room for it if no worker had anything."""
        for key in (need.wanted.of_any_size, need.wanted):
            if key in self._fits_empty:
                return self._fits_empty[key]
        found = self._place(need, self.reports, self._world.unleased, best=False)
        has_none = isinstance(found, NoRoom)
        self._fits_empty[need.wanted.of_any_size if found == NoRoom(of_any_size=True) else need.wanted] = not has_none
        return not has_none

    def can_be_made(self, need: Need, *, of_busy: bool) -> bool:
        """Whether it is of any use to look for workers of others that could go; `of_busy`: also for some that work."""
        if not self.fits_when_empty(need) and not self._may_return(need):
            return False
        return (need.wanted, of_busy) not in self._not_made or self._has_workers(need)

    def was_not_made(self, need: Need, *, of_busy: bool) -> None:
        """All workers that could go were tried: the next need that wants the same finds no others."""
        if not self._has_workers(need):
            self._not_made.add((need.wanted, of_busy))

    def _has_workers(self, need: Need) -> bool:
        """Of its function: for that one other workers may go than for others."""
        name = need.key[0]
        return any(self._world.view((name, number)).workers for number in self._world.numbers(name))

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
        self._no_room.clear()
        for worker in self._world.workers.values():
            assignment = worker.assignment
            if worker.state is WorkerState.PARKING and assignment.worker not in self._returned:
                expected = ParkedMemory(self._world.view(worker.key).parked_bytes or 0)
                self._book.grant(assignment.worker, assignment.node, assignment.share, expected)
            elif worker.state in (WorkerState.DRAINING, WorkerState.FAILED) or worker in self._leaving:
                self._book.release(assignment.worker)

    def claim(self, need: Need) -> bool:
        found = self._find_once(need, self.reports)
        self._take(found)
        return not isinstance(found, NoRoom)

    def evict_for(self, need: Need, candidates: list[WorkerView]) -> bool:
        """Park or drain the first of `candidates` whose going makes room, and no more than needed."""
        trial = self._book.copy()
        reports: list[NodeReport] = []
        gone: list[WorkerView] = []
        staying: dict[RevisionKey, Counter[WorkerState]] = {}
        found: Return | Placement | NoRoom = NoRoom()
        for worker in candidates:
            if worker in self._leaving or not self._can_spare(worker, need, staying):
                continue
            trial.release(worker.assignment.worker)
            gone.append(worker)
            self._staying(worker, staying)[worker.state] -= 1
            # No other node had room, nor has it now.
            reports = self._on(worker.assignment.node)
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
        self._no_room.clear()
        self._not_made.clear()
        return self.claim(need)

    def _on(self, node: str) -> list[NodeReport]:
        report = self._by_node.get(node)
        return [] if report is None else [report]

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

    def _find_once(self, need: Need, nodes: list[NodeReport]) -> Return | Placement | NoRoom:
        if need.wanted in self._no_room or need.wanted.of_any_size in self._no_room:
            return self._parked_of(need, self._book) or NoRoom()
        found = self._find(need, nodes, self._book)
        if isinstance(found, NoRoom):
            self._no_room.add(need.wanted.of_any_size if found.of_any_size else need.wanted)
        return found

    def _find(self, need: Need, nodes: list[NodeReport], book: LeaseBook) -> Return | Placement | NoRoom:
        return self._parked_of(need, book) or self._place(need, nodes, book)

    def _parked_of(self, need: Need, book: LeaseBook) -> Return | None:
        return next((Return(worker) for worker in self._may_return(need) if self._returns(worker, need, book)), None)

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
        report = self._by_node.get(assignment.node)
        if report is None:
            return False
        book.release(assignment.worker)
        used = book.used(assignment.node)
        book.grant(assignment.worker, assignment.node, assignment.share, worker.parked)
        return returns(need.revision.spec.resources, assignment.share, report, used, self._limits)

    def _place(self, need: Need, nodes: list[NodeReport], book: LeaseBook, *, best: bool = True) -> Placement | NoRoom:
        wanted = need.wanted
        return place(
            wanted.resources,
            nodes,
            book,
            self._limits,
            engine_kinds=wanted.engine_kinds,
            in_container=wanted.in_container,
            best=best,
        )

    def _staying(self, worker: WorkerView, known: dict[RevisionKey, Counter[WorkerState]]) -> Counter[WorkerState]:
        """Workers of its revision that do not leave, by state; counted once per search."""
        if worker.key not in known:
            of_revision = self._world.view(worker.key).workers.values()
            known[worker.key] = Counter(each.state for each in of_revision if each not in self._leaving)
        return known[worker.key]

    def _can_spare(self, worker: WorkerView, need: Need, staying: dict[RevisionKey, Counter[WorkerState]]) -> bool:
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
        counts = self._staying(worker, staying)
        left = sum(counts[state] for state in {WorkerState.READY, worker.state}) - 1
        return left >= policy.effective(record.spec.scaling, function).min_workers
