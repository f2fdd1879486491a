"""Room for who waits: what is granted in this step, and which idle workers of others go to make more of it. Pure."""

from __future__ import annotations

from collections.abc import Callable

from gpufn.protocol.messages import NodeReport
from gpufn.workers import WorkerState

from . import policy
from .actions import Need
from .leases import LeaseBook
from .limits import Limits
from .placement import NoRoom, Placement, place
from .views import WorkerView
from .world import World

SETTLE_S = 0.2  # a worker that has just become idle may have its next call on the way


def idle_longest_first(world: World, worker: WorkerView, now: float) -> tuple[float, str]:
    return -(world.idle_for(worker, now) or 0.0), worker.assignment.worker


class Room:
    """The leases as they are once this step is done. `leaving`: workers that it drains; `drain` makes one such."""

    def __init__(
        self, world: World, now: float, limits: Limits, leaving: set[str], drain: Callable[[WorkerView, str], None]
    ) -> None:
        self._world = world
        self._now = now
        self._limits = limits
        self._leaving = leaving
        self._drain = drain
        self._book = world.leases.copy()
        self._granted = 0

    def grant(self, need: Need, nodes: list[NodeReport]) -> Placement | NoRoom:
        """A share for a worker that starts now, on one of `nodes`."""
        found = self._place(need, nodes, self._book, explain=True)
        if isinstance(found, Placement):
            self._granted += 1
            self._book.grant(f"new-{self._granted}", found.node, found.share)
        return found

    def count_what_leaves(self) -> None:
        """What is already on its way out is room to come, first for those who wait for it."""
        for worker in self._world.workers.values():
            if worker.state in (WorkerState.DRAINING, WorkerState.FAILED) or worker.assignment.worker in self._leaving:
                self._book.release(worker.assignment.worker)

    def claim(self, need: Need) -> bool:
        found = self._place(need, self._world.reports(self._now), self._book)
        if isinstance(found, Placement):
            self._book.grant(f"claim-{need.key}", found.node, found.share)
        return isinstance(found, Placement)

    def evict_for(self, need: Need, candidates: list[WorkerView]) -> bool:
        """Drain the first of `candidates` whose going makes room, and no more than needed."""
        reports = self._world.reports(self._now)
        trial = self._book.copy()
        gone: list[WorkerView] = []
        found: Placement | NoRoom = NoRoom()
        for worker in candidates:
            if worker.assignment.worker in self._leaving or not self._can_spare(worker, gone):
                continue
            trial.release(worker.assignment.worker)
            gone.append(worker)
            found = self._place(need, reports, trial)
            if isinstance(found, Placement):
                break
        if isinstance(found, NoRoom):
            return False
        for victim in gone:
            # Without those whose going did not help: they are on other nodes, or too small.
            lease = victim.assignment
            trial.grant(lease.worker, lease.node, lease.share)
            if isinstance(self._place(need, reports, trial), Placement):
                continue
            trial.release(lease.worker)
            self._drain(victim, f"makes room for {need.key[0]}, which has calls and no room")
        self._book = trial
        return self.claim(need)

    def idle_workers(self) -> list[WorkerView]:
        found: list[WorkerView] = []
        for worker in self._world.workers.values():
            idle_s = self._world.idle_for(worker, self._now)
            if idle_s is None or idle_s < SETTLE_S or worker.assignment.worker in self._leaving:
                continue
            if self._world.calls(worker.key, self._now) == 0 and not self._world.has_rung(worker.key[0]):
                found.append(worker)
        return sorted(found, key=lambda worker: idle_longest_first(self._world, worker, self._now))

    def surplus_of_others(self, need: Need) -> list[WorkerView]:
        """READY workers of functions that have several, from who has most; they finish what they run."""
        found: list[tuple[int, str, WorkerView]] = []
        for key, view in self._world.views.items():
            ready = view.in_state(WorkerState.READY)
            is_same = key[0] == need.key[0]
            if key == need.key or (len(ready) < 2 and not is_same) or (is_same and need.is_failing):
                continue
            found += [(-len(ready), worker.assignment.worker, worker) for worker in ready[: None if is_same else -1]]
        return [worker for *_, worker in sorted(found, key=lambda entry: entry[:2])]

    def _place(
        self, need: Need, nodes: list[NodeReport], book: LeaseBook, *, explain: bool = False
    ) -> Placement | NoRoom:
        revision = need.spec
        return place(
            revision.spec.resources,
            nodes,
            book,
            self._limits,
            engine_kinds=revision.device_kinds,
            in_container=revision.spec.image is not None,
            explain=explain,
        )

    def _can_spare(self, worker: WorkerView, gone: list[WorkerView]) -> bool:
        """min_workers hold against others as well; a revision that is being replaced has none."""
        function = self._world.functions.get(worker.key[0])
        record = self._world.revisions.get(worker.key)
        if function is None or record is None or worker.key[1] != function.active:
            return True
        view = self._world.view(worker.key)
        leaving = self._leaving | {other.assignment.worker for other in gone}
        left = sum(other.assignment.worker not in leaving for other in view.in_state(WorkerState.READY)) - 1
        return left >= policy.effective(record.spec.scaling, function).min_workers
