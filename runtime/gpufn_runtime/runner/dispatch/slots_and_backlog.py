"""Where one Revision's calls can be on this node: in the slots of its workers, and in line for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpufn_runtime.runner.attempts.attempt import Attempt
from gpufn_runtime.runner.dispatch.local_backlog import Line

if TYPE_CHECKING:
    from gpufn_core.spec.function_spec import FunctionSpec
    from gpufn_runtime.runner.workers.worker_link import WorkerLink


class Places:
    """`links` are the Revision's workers here, by id. That a slot may take a call is decided by `free` alone."""

    def __init__(self, spec: FunctionSpec) -> None:
        self.links: dict[str, WorkerLink] = {}
        self.line = Line()
        self._warm_since = math.inf  # from then on there was always a worker that takes calls; unix seconds
        self._runs_per_worker = spec.concurrency
        self._calls_per_run = spec.batch.max_size if spec.batch is not None else 1  # at most; they share its time

    @property
    def free(self) -> int:
        """Slots that may take a call now."""
        return sum(link.free for link in self.links.values())

    @property
    def slots(self) -> int:
        """Of the workers that take calls, free or not."""
        return sum(link.slots.total for link in self.links.values() if link.takes_calls)

    def became_ready(self, link: WorkerLink, since: float) -> None:
        """`since` in unix seconds, as what follows."""
        if not any(other.takes_calls for other in self.links.values() if other is not link):
            self._warm_since = since
        else:
            self._warm_since = min(self._warm_since, since)

    def is_cold(self, submitted_at: float) -> bool:
        """A call that came then had to wait for a worker to become READY, not just for a slot."""
        return submitted_at < self._warm_since

    def least_busy(self) -> WorkerLink | None:
        """The worker with the most slots that may take a call, and sooner one that need not wait for its turn; None
        when none may."""
        best = None
        for link in self.links.values():
            if link.free and (best is None or (not link.needs_turn, link.free) > (not best.needs_turn, best.free)):
                best = link
        return best

    @property
    def takes_turns(self) -> bool:
        """A GPU that its workers share by time is contended: who is next is not for us to say."""
        return any(link.seat is not None and link.seat.takes_turns for link in self.links.values())

    def capacity(self) -> int:
        """Calls that may be here at a time."""
        return self.slots + self._longest_line()

    def room(self) -> int:
        """Calls that may come now: for the free slots, and to stand in line."""
        return self.free + self._longest_line() - len(self.line)

    def has_room(self) -> bool:
        """A call may come now."""
        return self.free > len(self.line) or self.room() > 0

    def lane_room(self) -> int:
        """Calls that gateways may bring by the lane at a time."""
        return self.capacity() if self.line.is_short and not self.takes_turns else 0

    def attempts(self) -> Iterator[Attempt]:
        for link in self.links.values():
            yield from link.attempts.values()

    def ended(self, run_s: float, body_bytes: int) -> None:
        """A run took so long, for as many calls as it may have had."""
        self.line.ended(run_s / self._calls_per_run, body_bytes)

    def _longest_line(self) -> int:
        if self.takes_turns:
            return 0
        workers = sum(link.takes_calls for link in self.links.values())
        return self.line.longest(workers * self._runs_per_worker)
