"""Room for waiting revisions: shares granted in this step, and workers of others that are removed to make room. Pure.

A waiting revision gets one of its own parked workers back if the worker's share is free; otherwise a share for a new
worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import cached_property

import msgspec

from gpufn_core.domain.revision import Revision, RevisionKey
from gpufn_core.domain.worker import Cause, ParkedMemory, WorkerState
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.priority import Priority
from gpufn_gateway.controller.decide.actions import Need
from gpufn_gateway.controller.decide.room.moves import Move, find_moves
from gpufn_gateway.controller.decide.room.scale_down import Removals, idle_longest_first
from gpufn_gateway.controller.decide.scaling import policy, rollout
from gpufn_gateway.controller.decide.scaling.circuit import CircuitState
from gpufn_gateway.controller.decide.scaling.rollout import Role
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement, can_resume, explain, place
from gpufn_gateway.controller.placement.request import Requirements
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.views import WorkerView
from gpufn_gateway.controller.state.world import World

_SEARCH_MOVES_S = 5.0  # a search looks at all nodes and idle workers
SETTLE_S = 0.2  # the next call of a worker that has just become idle may be on its way


class Resumption(msgspec.Struct, frozen=True):
    """A parked worker that resumes on its own node."""

    worker: WorkerView


class Allocator:
    """The leases as they will be after this step.

    Hundreds of functions may wait for room that a thousand nodes do not have. So each kind of request is searched once:
    the result "no room" holds until a lease ends, because grants make no room.
    """

    def __init__(self, world: World, now: float, limits: Limits, removals: Removals) -> None:
        self._world = world
        self._now = now
        self._limits = limits
        self._removals = removals
        self._book = world.leases.copy()
        self.reports = world.reports(now)
        self._by_node = {report.node: report for report in self.reports}
        self._no_room: set[Hashable] = set()  # Requirements, or their `any_size_key`
        self._full_at_any_size: set[Hashable] = set()  # had no room for any size when `_start` looked
        self._fits_empty: dict[Hashable, bool] = {}
        self._not_made: set[Hashable] = set()  # no removal of workers makes room for these
        self._rooms: dict[Requirements, bool] = {}
        self._granted = 0
        self._resumed: set[str] = set()
        self._parked: dict[RevisionKey, list[WorkerView]] = {}  # by revision, for those already searched

    def grant(self, need: Need, nodes: list[NodeReport]) -> Resumption | Placement | NoRoom:
        """Grant a parked worker that resumes, or a share for a new one on one of `nodes`."""
        result = self._find_once(need, nodes)
        if isinstance(result, NoRoom) and result.at_any_size and len(nodes) == len(self.reports):
            self._full_at_any_size.add(need.requirements.any_size_key)
        self._take(result)
        return result

    def explanation_key(self, need: Need) -> Hashable:
        """Return a key that is equal for all needs without room for the same reason."""
        any_size_key = need.requirements.any_size_key
        return any_size_key if any_size_key in self._full_at_any_size else need.requirements

    def explain(self, need: Need) -> str:
        at_any_size = need.requirements.any_size_key in self._full_at_any_size
        drained = self._world.drained_reports(self._now)
        return explain(
            need.requirements, self.reports, self._book, self._limits, at_any_size=at_any_size, drained=drained
        )

    def fits_empty_node(self, need: Need) -> bool:
        """Return whether a node would have room for it if there were no other workers."""
        for key in (need.requirements.any_size_key, need.requirements):
            if key in self._fits_empty:
                return self._fits_empty[key]
        result = place(need.requirements, self.reports, self._world.unleased, self._limits, best=False)
        key = need.requirements.any_size_key if result == NoRoom(at_any_size=True) else need.requirements
        self._fits_empty[key] = not isinstance(result, NoRoom)
        return self._fits_empty[key]

    def can_make(self, need: Need, *, include_busy: bool) -> bool:
        """Return whether a search for workers to remove can help. `include_busy`: also among busy workers."""
        if not self.fits_empty_node(need) and not self._resumable(need):
            return False
        return (need.requirements, include_busy) not in self._not_made or self._has_workers(need)

    def record_not_made(self, need: Need, *, include_busy: bool) -> None:
        """Record that removing any worker did not help: the next need for the same finds no others."""
        if not self._has_workers(need):
            self._not_made.add((need.requirements, include_busy))

    def _has_workers(self, need: Need) -> bool:
        """Return whether its function has workers: then more workers may be removed for it than for others."""
        name = need.key[0]
        return any(self._world.view((name, number)).workers for number in self._world.numbers(name))

    def _take(self, result: Resumption | Placement | NoRoom) -> None:
        if isinstance(result, Placement):
            for place_ in result.by_rank:
                self._granted += 1
                self._book.grant(f"new-{self._granted}", place_.node, place_.share)
        elif isinstance(result, Resumption):
            assignment = result.worker.assignment
            self._resumed.add(assignment.worker)
            self._book.grant(assignment.worker, assignment.node, assignment.share)

    def count_leaving(self) -> None:
        """Count the shares of leaving workers as free, first for the functions that they leave for."""
        self._no_room.clear()
        for worker in self._world.workers.values():
            assignment = worker.assignment
            if worker.state is WorkerState.PARKING and assignment.worker not in self._resumed:
                expected = ParkedMemory(self._world.view(worker.key).parked_bytes or 0)
                self._book.grant(assignment.worker, assignment.node, assignment.share, expected)
            elif worker.state in (WorkerState.DRAINING, WorkerState.FAILED) or worker in self._removals:
                self._book.release(assignment.worker)

    def claim(self, need: Need) -> bool:
        result = self._find_once(need, self.reports)
        self._take(result)
        return not isinstance(result, NoRoom)

    def evict_for(self, need: Need, candidates: list[WorkerView]) -> bool:
        """Park or drain the first of `candidates` whose removal makes room, and no more than necessary."""
        trial = self._book.copy()
        reports: list[NodeReport] = []
        removed: list[WorkerView] = []
        staying: dict[RevisionKey, Counter[WorkerState]] = {}
        result: Resumption | Placement | NoRoom = NoRoom()
        is_gang = need.requirements.resources.nodes > 1
        if is_gang and not self._fits_without(need, candidates):
            return False  # else each candidate would cost a search of all nodes
        for worker in candidates:
            if worker in self._removals or not self._can_spare(worker, need, staying):
                continue
            self._release(trial, worker)
            removed.append(worker)
            self._staying(worker, staying)[worker.state] -= 1
            # No other node had room, and none has gained any.
            reports = self.reports if is_gang else self._on(worker)
            result = self._find(need, reports, trial)
            if not isinstance(result, NoRoom):
                break
        if isinstance(result, NoRoom):
            return False
        for victim in removed:
            # Keep the workers whose removal did not help: they are on other nodes, or too small.
            for process in self._world.ranks(victim):
                lease = process.assignment
                trial.grant(lease.worker, lease.node, lease.share, process.parked)
            if not isinstance(self._find(need, reports, trial), NoRoom):
                continue
            reason = f"makes room for {need.key[0]}, which has calls and no room"
            parked = self._removals.memory_if_parked(victim)
            if parked is not None:
                lease = victim.assignment
                trial.grant(lease.worker, lease.node, lease.share, parked)
                has_room = not isinstance(self._find(need, reports, trial), NoRoom)
                if has_room and self._removals.park(victim, reason, Cause.ROOM):
                    continue
            self._release(trial, victim)
            self._removals.drain(victim, reason, Cause.ROOM)
        self._book = trial
        self._no_room.clear()
        self._not_made.clear()
        return self.claim(need)

    def move_for(self, need: Need, idle: list[WorkerView]) -> tuple[Move, ...]:
        """Return moves of workers in `idle` that make room. Their leases stay until the replacements are READY."""
        if self._world.moving or self._now < self._world.search_moves_at or not self.fits_empty_node(need):
            return ()
        found = find_moves(
            [worker for worker in idle if self._is_movable(worker, need)],
            self.reports,
            self._book,
            place_waiting=lambda nodes, book: place(need.requirements, nodes, book, self._limits, best=False),
            place_again=self._place_again,
        )
        self._world.search_moves_at = self._now + _SEARCH_MOVES_S
        for move in found:
            self._book.grant(f"instead-of-{move.worker.assignment.worker}", move.to.node, move.to.share)
        return found

    def _is_movable(self, worker: WorkerView, need: Need) -> bool:
        if worker.state is not WorkerState.READY or worker in self._removals or worker.key[0] == need.key[0]:
            return False
        revision = self._world.revisions.get(worker.key)
        if revision is None or revision.spec.resources.nodes > 1:
            return False
        can_start = self._world.view(worker.key).circuit.state(self._now) is CircuitState.CLOSED
        return can_start and self._has_room(self._requirements(worker.key, revision))

    def _has_room(self, requirements: Requirements) -> bool:
        """Return whether a node has room now, before any move."""
        if requirements not in self._rooms:
            result = place(requirements, self.reports, self._book, self._limits, best=False)
            self._rooms[requirements] = not isinstance(result, NoRoom)
        return self._rooms[requirements]

    def _place_again(self, worker: WorkerView, book: LeaseBook) -> Placement | NoRoom:
        requirements = self._requirements(worker.key, self._world.revisions[worker.key])
        return place(requirements, self.reports, book, self._limits)

    def _requirements(self, key: RevisionKey, revision: Revision) -> Requirements:
        return Requirements.from_revision(revision, self._world.teams.of(key[0]))

    def _fits_without(self, need: Need, candidates: list[WorkerView]) -> bool:
        trial = self._book.copy()
        for worker in candidates:
            self._release(trial, worker)
        return not isinstance(self._find(need, self.reports, trial), NoRoom)

    def _release(self, book: LeaseBook, worker: WorkerView) -> None:
        for process in self._world.ranks(worker):
            book.release(process.assignment.worker)

    def _on(self, worker: WorkerView) -> list[NodeReport]:
        """Return the reports of the worker's nodes."""
        nodes = (process.assignment.node for process in self._world.ranks(worker))
        return [self._by_node[node] for node in nodes if node in self._by_node]

    def parked_workers(self) -> list[WorkerView]:
        """Return the parked workers of revisions without calls, least worth first."""
        parked = [worker for worker in self._world.workers.values() if worker.state is WorkerState.PARKED]
        return sorted((worker for worker in parked if not self._has_calls(worker)), key=self._worth)

    def _worth(self, worker: WorkerView) -> tuple[float, str]:
        name = worker.assignment.worker
        return self._world.holdings.host_memory(worker.assignment.node).worth(name), name

    def idle_workers(self) -> list[WorkerView]:
        """Return the idle workers, and starting workers that no call waits for any longer; longest idle first."""
        workers: list[WorkerView] = []
        for worker in self._world.workers.values():
            if worker in self._removals or worker.assignment.rank:
                continue
            if worker.state is WorkerState.STARTING:
                idle_s = None if self._is_next(worker) else self._now - worker.since
            elif worker.state is WorkerState.READY:
                idle_s = self._world.idle_for(worker, self._now)
            else:
                continue
            if idle_s is not None and idle_s >= SETTLE_S and not self._has_calls(worker):
                workers.append(worker)
        return sorted(workers, key=lambda worker: idle_longest_first(self._world, worker, self._now))

    def _is_next(self, worker: WorkerView) -> bool:
        """Return whether calls will go to the worker's revision once it has started."""
        function = self._world.functions.get(worker.key[0])
        return function is not None and worker.key[1] == function.active != function.serving

    def surplus_of_others(self, need: Need) -> list[WorkerView]:
        """Return READY workers of functions that have several, largest count first. They finish their calls."""
        surplus: list[tuple[int, str, WorkerView]] = []
        for key, ready in self._ready.items():
            is_same = key[0] == need.key[0]
            if key == need.key or (len(ready) < 2 and not is_same) or (is_same and need.is_failing):
                continue
            surplus += [(-len(ready), worker.assignment.worker, worker) for worker in ready[: None if is_same else -1]]
        return [worker for *_, worker in sorted(surplus, key=lambda entry: entry[:2])]

    def workers_of_low_priority(self) -> list[WorkerView]:
        """Return the READY workers of preemptible functions, which have the priority `low`."""
        return [
            worker
            for key, ready in self._ready.items()
            if (record := self._world.revisions.get(key)) is not None and record.spec.priority is Priority.LOW
            for worker in ready
        ]

    @cached_property
    def _ready(self) -> dict[RevisionKey, list[WorkerView]]:
        """READY workers by revision, computed once a step: hundreds of functions may wait for a small node."""
        ready = {key: view.in_state(WorkerState.READY) for key, view in self._world.views.items()}
        return {key: workers for key, workers in ready.items() if workers}

    def _has_calls(self, worker: WorkerView) -> bool:
        return self._world.calls(worker.key, self._now) != 0 or self._world.depths.has_wakeup(worker.key[0])

    def _find_once(self, need: Need, nodes: list[NodeReport]) -> Resumption | Placement | NoRoom:
        if need.requirements in self._no_room or need.requirements.any_size_key in self._no_room:
            return self._parked_of(need, self._book) or NoRoom()
        result = self._find(need, nodes, self._book)
        if isinstance(result, NoRoom):
            self._no_room.add(need.requirements.any_size_key if result.at_any_size else need.requirements)
        return result

    def _find(self, need: Need, nodes: list[NodeReport], book: LeaseBook) -> Resumption | Placement | NoRoom:
        """Resume a parked worker, unless starts are measured to be faster and there is room for one; else place one."""
        parked = self._parked_of(need, book)
        if parked is not None and not need.view.slower_resume:
            return parked
        placement = place(need.requirements, nodes, book, self._limits, starts=need.starts)
        return parked if parked is not None and isinstance(placement, NoRoom) else placement

    def _parked_of(self, need: Need, book: LeaseBook) -> Resumption | None:
        return next(
            (Resumption(worker) for worker in self._resumable(need) if self._can_resume(worker, need, book)), None
        )

    def _resumable(self, need: Need) -> list[WorkerView]:
        """Return its parking and parked workers. Parking ones come first, because they have their share; then the most
        recently used."""
        workers = self._parked.get(need.key)
        if workers is None:  # compute it once a step: a thousand workers of one function may be wanted
            workers = need.view.in_state(WorkerState.PARKING, WorkerState.PARKED)
            workers.sort(key=lambda each: (each.parked is not None, self._world.idle_for(each, self._now) or 0.0))
            self._parked[need.key] = workers
        return [each for each in workers if each.assignment.worker not in self._resumed | self._removals.names]

    def _can_resume(self, worker: WorkerView, need: Need, book: LeaseBook) -> bool:
        assignment = worker.assignment
        if worker.state is WorkerState.PARKING:
            return True
        report = self._by_node.get(assignment.node)
        if report is None:
            return False
        book.release(assignment.worker)
        used = book.used(assignment.node)
        book.grant(assignment.worker, assignment.node, assignment.share, worker.parked)
        return can_resume(need.revision.spec.resources, assignment.share, report, used, self._limits)

    def _staying(self, worker: WorkerView, counts: dict[RevisionKey, Counter[WorkerState]]) -> Counter[WorkerState]:
        """Count the remaining workers of its revision by state, once per search."""
        if worker.key not in counts:
            of_revision = self._world.view(worker.key).workers.values()
            counts[worker.key] = Counter(each.state for each in of_revision if each not in self._removals)
        return counts[worker.key]

    def can_spare(self, worker: WorkerView, need: Need) -> bool:
        """Return whether min_workers permits the removal of one worker."""
        return self._can_spare(worker, need, {})

    def _can_spare(self, worker: WorkerView, need: Need, staying: dict[RevisionKey, Counter[WorkerState]]) -> bool:
        """Return whether min_workers permits the removal. It protects workers against other functions too, except
        workers of a revision that is being replaced. Parked workers do not count. An idle worker is not protected
        against calls for older revisions of its function: those calls would wait forever."""
        function = self._world.functions.get(worker.key[0])
        record = self._world.revisions.get(worker.key)
        if worker.state is WorkerState.PARKED or function is None or record is None:
            return True
        if worker.key[1] != function.active and rollout.role_of(function, worker.key[1]) is not Role.SPLIT:
            return True
        is_before_it = need.key[0] == function.name and need.key[1] != function.serving
        if is_before_it and self._world.idle_for(worker, self._now) is not None:
            return True
        counts = self._staying(worker, staying)
        remaining = sum(counts[state] for state in {WorkerState.READY, worker.state}) - 1
        scaling = policy.effective(record.spec.scaling, function)
        return remaining >= rollout.part_of(scaling, function, worker.key[1]).min_workers
