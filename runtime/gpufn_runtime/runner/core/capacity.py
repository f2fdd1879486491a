"""Capacity for one Revision's calls on this node: the slots of its workers, and the local backlog. Pure.

`least_busy` chooses the worker for a call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic, TypeVar

from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.backlog import Backlog
from gpufn_runtime.runner.core.views import WorkerView

W = TypeVar("W", bound=WorkerView)


class Capacity(Generic[W]):
    """`workers` are the Revision's workers here, by id. Only `free` decides whether a slot may take a call."""

    def __init__(self, spec: FunctionSpec) -> None:
        self.workers: dict[str, W] = {}
        self.backlog = Backlog()
        self._warm_since = math.inf  # since then some worker has always been ready; unix seconds
        self._runs_per_worker = spec.concurrency
        batch = spec.largest_batch
        self._calls_per_run = batch.max_size if batch is not None else 1  # maximum; they share the run's time

    @property
    def free(self) -> int:
        """Number of slots that may take a call now."""
        free = 0
        for worker in self.workers.values():  # faster than a generator, here and below; each call needs these often
            free += worker.free
        return free

    @property
    def slots(self) -> int:
        """Number of slots of the workers that take calls, free or not."""
        slots = 0
        for worker in self.workers.values():
            if worker.accepts_calls:
                slots += worker.slots.total
        return slots

    def became_ready(self, worker: WorkerView, since: float) -> None:
        """Record a READY worker. `since` is in unix seconds."""
        if not any(other.accepts_calls for other in self.workers.values() if other is not worker):
            self._warm_since = since
        else:
            self._warm_since = min(self._warm_since, since)

    def is_cold(self, submitted_at: float) -> bool:
        """Return whether a call submitted at that time had to wait for a worker to start, not just for a slot."""
        return submitted_at < self._warm_since

    def least_busy(self) -> W | None:
        """Return the worker with the most free slots, preferring workers that need no GPU turn; None if no slot is
        free."""
        best = None
        for worker in self.workers.values():
            free = worker.free
            if free and (best is None or (not worker.needs_turn, free) > (not best.needs_turn, best.free)):
                best = worker
        return best

    @property
    def must_take_turns(self) -> bool:
        """Whether turns are required on a GPU that the workers share by time; then calls are not ordered here."""
        for worker in self.workers.values():  # noqa: SIM110  faster
            if worker.must_take_turns:
                return True
        return False

    def total(self) -> int:
        """Return the number of calls that may be here at once."""
        return self.slots + self._max_backlog()

    def room(self) -> int:
        """Return the number of calls that may arrive now: for free slots, and for the backlog."""
        return self.free + self._max_backlog() - len(self.backlog)

    def fast_path_limit(self) -> int:
        """Return the number of calls that gateways may bring by the fast path at once."""
        return self.total() if self.backlog.is_short and not self.must_take_turns else 0

    def attempts(self) -> Iterator[Attempt]:
        for worker in self.workers.values():
            yield from worker.attempts.values()

    def ended(self, run_s: float, body_bytes: int) -> None:
        """Record a run's duration, for as many calls as a batch may have."""
        self.backlog.ended(run_s / self._calls_per_run, body_bytes)

    def _max_backlog(self) -> int:
        if self.must_take_turns:
            return 0
        ready_workers = 0
        for worker in self.workers.values():
            ready_workers += worker.accepts_calls
        return self.backlog.max_length(ready_workers * self._runs_per_worker)
