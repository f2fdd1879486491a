"""Attempts of one Revision that have a slot and wait for their worker's turn on a GPU (gpu_turns.py).

Nothing of them has begun. So one whose time is over has expired, and one whose worker goes is handed back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from gpufn_core.domain.invocation import Outcome, OutcomeKind, waited_too_long
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import GpufnError, InvocationCancelled
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.attempts.attempt import ARRIVED, Attempt, AwaitsTurn
from gpufn_runtime.runner.attempts.attempt_index import Attempts
from gpufn_runtime.runner.attempts.settle import Settler
from gpufn_runtime.runner.dispatch.slots_and_backlog import Places
from gpufn_runtime.runner.workers.shared_bodies import NodeParcels
from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)


class Waits:
    """`free(attempt)` frees its slot; `freed(link)` is told of that when the attempt has ended here."""

    def __init__(
        self,
        revision: Revision,
        places: Places,
        *,
        clock: Clock,
        settler: Settler,
        parcels: NodeParcels,
        attempts: Attempts,
        free: Callable[[Attempt], None],
        freed: Callable[[WorkerLink], None],
    ) -> None:
        self._revision = revision
        self._places = places
        self._clock = clock
        self._settler = settler
        self._parcels = parcels
        self._attempts = attempts
        self._free = free
        self._freed = freed

    def ask(self, attempt: Attempt, begin: Callable[[], None]) -> bool:
        """Call `begin` now, or in its turn. False: it waits."""
        seat = attempt.link.seat
        if seat is None:
            begin()
            return True

        def over() -> None:
            attempt.phase = ARRIVED
            self._attempts.discard(attempt)
            begin()

        if seat.ask(attempt, over):
            return True
        attempt.phase = AwaitsTurn(seat.gpu, until=self._expires_at(attempt))
        self._attempts.add(attempt)
        return False

    def tick(self, now: float, touch: Callable[[Attempt, float], None]) -> bool:
        """Touch them, and end whose time is over. Whether any waits; `now` is monotonic."""
        waits = list(self._all())
        for attempt in waits:
            if not isinstance(attempt.phase, AwaitsTurn):
                continue  # the end of one of the others gave it its turn
            if now >= attempt.phase.until:
                waited_s = self._clock.time() - attempt.message.submitted_at
                expired = waited_too_long(waited_s).info()
                self._end(attempt, Outcome(OutcomeKind.EXPIRED, expired))
            else:
                touch(attempt, now)
        return bool(waits)

    def cancel(self, attempt: Attempt) -> None:
        self._end(attempt, Outcome(OutcomeKind.CANCELLED, InvocationCancelled().info()))

    def hand_back(self, link: WorkerLink) -> None:
        """Its worker takes nothing more."""
        for attempt in link.seat.give_up_waits() if link.seat is not None else ():
            self._leave(attempt)
            with contextlib.suppress(GpufnError):  # without the bus it comes again by itself
                attempt.delivery.nak()

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        self._leave(attempt)
        keep_s = self._revision.spec.retention_s
        self._settler.refuse(attempt.delivery, attempt.message, outcome, self._clock.time(), keep_s)
        self._freed(attempt.link)

    def _leave(self, attempt: Attempt) -> None:
        attempt.phase = ARRIVED
        self._parcels.drop(attempt.link.worker, attempt.parcel)
        self._free(attempt)

    def _all(self) -> Iterator[Attempt]:
        for link in self._places.links.values():
            if link.seat is not None:
                yield from link.seat.waits

    def _expires_at(self, attempt: Attempt) -> float:
        """Monotonic."""
        at = attempt.message.expires_at(self._revision.spec.queue_timeout_s, attempt.delivery.delivered)
        return self._clock.monotonic() + at - self._clock.time()
