"""Attempts of one Revision that have a slot and wait for their worker's turn on a GPU (gpu_turns.py).

They have not begun. One that waits too long expires; one whose worker goes is handed back.
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
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies
from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)


class TurnWaits:
    """Attempts that wait for a turn. `free(attempt)` frees an attempt's slot. `on_freed(link)` is called after an
    attempt has ended here."""

    def __init__(
        self,
        revision: Revision,
        places: Places,
        *,
        clock: Clock,
        settler: Settler,
        shared_bodies: NodeSharedBodies,
        attempts: Attempts,
        free: Callable[[Attempt], None],
        on_freed: Callable[[WorkerLink], None],
    ) -> None:
        self._revision = revision
        self._places = places
        self._clock = clock
        self._settler = settler
        self._shared_bodies = shared_bodies
        self._attempts = attempts
        self._free = free
        self._on_freed = on_freed

    def request(self, attempt: Attempt, begin: Callable[[], None]) -> bool:
        """Call `begin` now, or when the turn comes. Returns False if the attempt waits."""
        seat = attempt.link.seat
        if seat is None:
            begin()
            return True

        def on_turn() -> None:
            attempt.phase = ARRIVED
            self._attempts.discard(attempt)
            begin()

        if seat.request(attempt, on_turn):
            return True
        attempt.phase = AwaitsTurn(seat.gpu, until=self._expires_at(attempt))
        self._attempts.add(attempt)
        return False

    def tick(self, now: float, touch: Callable[[Attempt, float], None]) -> bool:
        """Extend the leases of waiting attempts, and end expired ones. Returns whether any waits. `now` is
        monotonic."""
        attempts = list(self._all())
        for attempt in attempts:
            if not isinstance(attempt.phase, AwaitsTurn):
                continue  # it got the turn because another one expired
            if now >= attempt.phase.until:
                waited_s = self._clock.time() - attempt.message.submitted_at
                expired = waited_too_long(waited_s).info()
                self._end(attempt, Outcome(OutcomeKind.EXPIRED, expired))
            else:
                touch(attempt, now)
        return bool(attempts)

    def cancel(self, attempt: Attempt) -> None:
        self._end(attempt, Outcome(OutcomeKind.CANCELLED, InvocationCancelled().info()))

    def hand_back(self, link: WorkerLink) -> None:
        """Hand back the waiting attempts of a worker that takes no more calls."""
        for attempt in link.seat.remove_waiting() if link.seat is not None else ():
            self._leave(attempt)
            with contextlib.suppress(GpufnError):  # without the bus, it is redelivered after ack_wait
                attempt.delivery.nak()

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        self._leave(attempt)
        keep_s = self._revision.spec.retention_s
        self._settler.refuse(attempt.delivery, attempt.message, outcome, self._clock.time(), keep_s)
        self._on_freed(attempt.link)

    def _leave(self, attempt: Attempt) -> None:
        attempt.phase = ARRIVED
        self._shared_bodies.drop(attempt.link.worker, attempt.parcel)
        self._free(attempt)

    def _all(self) -> Iterator[Attempt]:
        for link in self._places.links.values():
            if link.seat is not None:
                yield from link.seat.waiting

    def _expires_at(self, attempt: Attempt) -> float:
        """Return when the attempt expires; monotonic."""
        expires_at = attempt.message.expires_at(self._revision.spec.queue_timeout_s, attempt.delivery.delivered)
        return self._clock.monotonic() + expires_at - self._clock.time()
