"""Calls of one Revision as they arrive on this node, from its queues or by the lane: each runs, stands in line, or is
handed back.

A delivery gets the free slot of the least busy worker. While calls are short, one that finds none stands in line
(line.py). Otherwise, when a worker died or started to drain under a standing credit, it is handed back.

The lane (lane.py) brings short calls past the queue while none waits there. They take slots whose credits stand in the
queue, so a delivery may come for a slot that is taken: it stands in line, too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from gpufn_core.domain.invocation import Outcome, OutcomeKind, waited_too_long
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import (
    ArtifactUnavailable,
    GpufnError,
    InvalidInput,
    InvocationCancelled,
    ProtocolMismatch,
    WorkerLost,
)
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import BodyReference
from gpufn_core.spec.priority import QueueKind
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import call_records, queued_calls
from gpufn_platform.queue.delivery import Delivery, Ledger
from gpufn_runtime.runner.attempts.attempt import Attempt
from gpufn_runtime.runner.attempts.attempt_index import Attempts
from gpufn_runtime.runner.attempts.settle import Settler
from gpufn_runtime.runner.attempts.start_log import Starts
from gpufn_runtime.runner.attempts.start_numbers import first_reason
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.dispatch.local_backlog import Waiting
from gpufn_runtime.runner.dispatch.pull_credits import ACK_WAIT_S, Intake
from gpufn_runtime.runner.dispatch.slots_and_backlog import Places
from gpufn_runtime.runner.recovery.abandoned_calls import Departed
from gpufn_runtime.runner.workers.shared_bodies import NodeParcels

log = logging.getLogger(__name__)

_TOO_MANY_DELIVERIES = 100  # each a runner that died with it, or a hand-back
_CALLER_BACK_S = 1.0  # who lost the bus is back
_FETCH_AGAIN_S = 1.0  # the bus is back, or memory is free
_CANCELLED = Outcome(OutcomeKind.CANCELLED, InvocationCancelled().info())


class Arrivals:
    """`run(attempt, body)` begins an attempt whose slot is taken; `drop(attempt)` frees the slot of one that was over
    before it began. `ask(attempt, begin)` calls `begin` when it is its worker's turn on the GPU. `on_room(revision,
    calls)` is told how many the lane may bring at a time. `on_fetch()` is called when an attempt begins to wait for its
    arguments: from then on it is to be touched."""

    def __init__(
        self,
        bus: Bus,
        revision: Revision,
        places: Places,
        *,
        clock: Clock,
        settler: Settler,
        starts: Starts,
        departed: Departed,
        parcels: NodeParcels,
        bodies: NodeBodies,
        attempts: Attempts,
        run: Callable[[Attempt, bytes], None],
        drop: Callable[[Attempt], None],
        ask: Callable[[Attempt, Callable[[], None]], None],
        on_room: Callable[[Revision, int], None],
        on_fetch: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._revision = revision
        self._places = places
        self._line = places.line
        self._clock = clock
        self._settler = settler
        self._starts = starts
        self._departed = departed
        self._parcels = parcels
        self._bodies = bodies
        self._on_fetch = on_fetch
        self.fetching: set[Attempt] = set()  # their arguments are on the way from the bus
        self._attempts = attempts
        self._run = run
        self._drop = drop
        self._ask = ask
        self._on_room = on_room
        self._methods = {method.name: method for method in revision.spec.methods}
        self._intake = Intake(
            bus, revision, room=places.room, capacity=places.capacity, take=self._take, clock=clock
        )  # fmt: skip
        self._tasks = Tasks(f"arrivals of {revision}")

    @property
    def ledgers(self) -> Mapping[QueueKind, Ledger]:
        """What the queues have handed over here."""
        return self._intake.ledgers

    def open(self) -> None:
        """Start to pull."""
        self._intake.open()

    def close(self) -> None:
        """Pull nothing more, and hand back who stands in line."""
        self._hand_back_line()
        self._intake.close()
        self._tell_room()

    def tick(self, now: float) -> None:
        """Each second: a look at the queues."""
        self._intake.tick(now)
        self._tell_room()

    def offer(self, delivery: DirectDelivery) -> None:
        """A call that came by the lane: run it now or in a moment, or not here."""
        has_room = self._places.has_room() and not self._places.takes_turns
        if has_room and not self._intake.others_wait(delivery.message.priority):
            self._start(delivery, delivery.message, delivery.body)
        else:
            delivery.nak()

    def on_doorbell(self, queue: QueueKind) -> None:
        """A call was queued there."""
        self._intake.on_doorbell(queue)

    def look(self) -> None:
        """Calls may wait in the queues that no credit stands in."""
        self._intake.look()

    # --- room for them ------------------------------------------------------------------------------------------------

    def more_room(self) -> None:
        """A worker takes calls from now on."""
        self._tell_room()
        self._intake.offer()

    def less_room(self) -> None:
        """A worker takes no more calls."""
        self._intake.shrink()
        self._tell_room()

    def slot_freed(self) -> None:
        """For who stands in line, or who is still queued."""
        self.serve_line()
        self._intake.offer()

    def slot_poisoned(self) -> None:
        self._intake.shrink()

    def close_line_while(self, a_call_lasts: bool) -> None:
        """Nobody stands in line behind one that does."""
        if a_call_lasts is not self._line.is_closed:
            self._line.is_closed = a_call_lasts
            self._tell_room()
        if a_call_lasts:
            self._hand_back_line()
            self._intake.shrink()

    def _tell_room(self) -> None:
        self._on_room(self._revision, self._places.lane_room())

    def serve_line(self) -> None:
        """Slots may have become free, or be gone."""
        while self._line and self._places.free:
            waiting = self._line.next()
            if isinstance(waiting.delivery, DirectDelivery) and waiting.delivery.is_withdrawn:
                waiting.delivery.term()
            else:
                self._start(*waiting)
        if self._line and not (self._places.slots and self._line.is_short):
            self._hand_back_line()

    def _hand_back_line(self) -> None:
        while self._line:
            with contextlib.suppress(GpufnError):  # without the bus it comes again by itself
                self._hand_back(self._line.next())

    # --- one by one ---------------------------------------------------------------------------------------------------

    def _take(self, delivery: Delivery) -> None:
        try:
            message, body = queued_calls.unpack(delivery.payload, delivery.seq)
        except ProtocolMismatch as error:
            log.error("%r cannot be read and is removed: %s", delivery, error)
            delivery.term("unreadable")
            self._intake.offer()
            return
        self._start(delivery, message, body)

    def _start(self, delivery: Delivery | DirectDelivery, message: InvocationMessage, body: bytes) -> None:
        now = self._clock.time()
        if message.not_before > now:
            delivery.nak(min(message.not_before - now, self._longest_delay_s(message)))
            self._intake.offer()
        elif now >= message.expires_at(self._revision.spec.queue_timeout_s, delivery.delivered):
            expired = waited_too_long(now - message.submitted_at).info()
            self._refuse(delivery, message, Outcome(OutcomeKind.EXPIRED, expired), now)
        elif (link := self._places.least_busy()) is None:
            self._stand_in_line(Waiting(delivery, message, body))
        elif delivery.delivered > _TOO_MANY_DELIVERIES:
            lost = WorkerLost(f"delivered {delivery.delivered} times without an end").info()
            self._refuse(delivery, message, Outcome(OutcomeKind.LOST, lost), now)
        elif (method := self._methods.get(message.method)) is None:
            unknown = InvalidInput(f"{self._revision} has no method {message.method!r}").info()
            self._refuse(delivery, message, Outcome(OutcomeKind.REJECTED, unknown), now)
        else:
            try:
                parcel = self._parcels.give(message, link.worker)
            except GpufnError as error:
                self._refuse(delivery, message, Outcome(OutcomeKind.LOST, error.info()), now)
                return
            number, at = link.next_attempt_number(), self._clock.monotonic()
            attempt = Attempt(number, delivery, message, method, link, parcel, touched_at=at)
            if message.attempt > 1:
                attempt.reason = first_reason(message)
            link.slots.take()
            link.idle_since = None
            if message.reference is not None and not parcel:
                self._look_up(attempt, self._fetch(attempt, message.reference))
            else:
                self._ask_or_begin(attempt, body)

    def _ask_or_begin(self, attempt: Attempt, body: bytes) -> None:
        if attempt.link.seat is None:
            self._begin(attempt, body)
        else:
            self._ask(attempt, lambda: self._begin(attempt, body))

    async def _fetch(self, attempt: Attempt, reference: BodyReference) -> None:
        """Its arguments are not in its message. They are fetched before it asks for a turn on the GPU."""
        self.fetching.add(attempt)
        self._on_fetch()
        try:
            attempt.parcel = await self._bodies.fetch_arguments(reference, attempt.link.worker)
        except ArtifactUnavailable as error:
            self._drop(attempt)
            lost = Outcome(OutcomeKind.LOST, error.info())
            self._refuse(attempt.delivery, attempt.message, lost, self._clock.time())
            return
        except GpufnError as error:
            log.warning("the arguments of %s cannot be fetched now: %s", attempt.message.id, error)
            self._return(attempt, _FETCH_AGAIN_S)
            return
        finally:
            self.fetching.discard(attempt)
        if _has_lost_its_worker(attempt):
            self._return(attempt)
        elif attempt.is_cancelled:
            self._end_unbegun(attempt)
        else:
            self._ask_or_begin(attempt, b"")

    def _begin(self, attempt: Attempt, body: bytes) -> None:
        if attempt.is_submitted and (attempt.delivery.delivered > 1 or attempt.message.attempt > 1):
            self._look_up(attempt, self._run_unless_ended(attempt, body))
        elif attempt.delivery.delivered > 1 or (not attempt.is_direct and self._departed.was_away(attempt.message)):
            self._look_up(attempt, self._run_if_waited_for(attempt, body))
        else:
            if attempt.message.may_have_begun:
                self._starts.number(attempt, None)
            self._run(attempt, body)

    def _look_up(self, attempt: Attempt, looking: Coroutine[Any, Any, None]) -> None:
        self._attempts.add(attempt)
        self._tasks.start(looking)

    def _refuse(
        self, delivery: Delivery | DirectDelivery, message: InvocationMessage, outcome: Outcome, now: float
    ) -> None:
        self._settler.refuse(delivery, message, outcome, now, self._revision.spec.retention_s)
        self._intake.offer()

    def _stand_in_line(self, waiting: Waiting) -> None:
        if self._line.is_short and self._places.slots:
            self._line.append(waiting)
        else:
            self._hand_back(waiting)

    def _hand_back(self, waiting: Waiting) -> None:
        waiting.delivery.nak()
        if isinstance(waiting.delivery, Delivery):
            self._intake.handed_back(waiting.message)

    async def _run_unless_ended(self, attempt: Attempt, body: bytes) -> None:
        """A delivery that came before may have ended the invocation, or have queued its next attempt, without being
        acked; and a cancel may have ended it between two attempts, or come while that is looked up. Or another runner
        has it: a bus that stood still hands out again what runs, before it reads that it does."""
        known = held = note = None
        is_repeated = attempt.delivery.delivered > 1
        try:
            known = await call_records.record_of(self._bus, attempt.message.id)
            if is_repeated:
                held = await call_records.where(self._bus, attempt.message.id)
                note = await self._starts.read(attempt.message.id, attempt.delivery.seq)
        except GpufnError as error:
            log.warning("could not look up %s: %s", attempt.message.id, error)
        if _has_lost_its_worker(attempt):
            self._return(attempt)
        elif known is not None and known[0].state.ended:
            self._drop(attempt)
            self._settler.confirm(attempt.delivery, known[0])
        elif known is not None and known[0].attempt > attempt.message.attempt:
            self._drop(attempt)
            self._settler.drop(attempt.delivery)
        elif attempt.is_cancelled:
            self._end_unbegun(attempt)
        elif held is not None:
            self._return(attempt, ACK_WAIT_S)
        else:
            if is_repeated:
                self._starts.number(attempt, note)
            self._run(attempt, body)
            if is_repeated:
                self._starts.note(attempt)

    async def _run_if_waited_for(self, attempt: Attempt, body: bytes) -> None:
        """The caller may have died with the runner that had it before, as of a call that a function made there, or
        while it was queued: it need not run for nobody. Or another runner has it, as above."""
        is_held, is_waited_for = attempt.delivery.delivered > 1 and await self._is_elsewhere(attempt), None
        if not is_held:
            is_waited_for = await self._departed.is_waited_for(attempt.message)
        if _has_lost_its_worker(attempt):
            self._return(attempt)
        elif is_held:
            self._return(attempt, ACK_WAIT_S)
        elif is_waited_for is None:
            self._return(attempt, _CALLER_BACK_S)
        elif attempt.is_cancelled or not is_waited_for:
            self._end_unbegun(attempt)
        else:
            self._starts.number(attempt, None)
            self._run(attempt, body)

    async def _is_elsewhere(self, attempt: Attempt) -> bool:
        try:
            return await call_records.where(self._bus, attempt.message.id) is not None
        except GpufnError as error:
            log.warning("could not look up who runs %s: %s", attempt.message.id, error)
            return False

    def _return(self, attempt: Attempt, delay_s: float = 0) -> None:
        self._drop(attempt)
        with contextlib.suppress(GpufnError):  # without the bus it comes again by itself
            attempt.delivery.nak(delay_s)

    def _end_unbegun(self, attempt: Attempt) -> None:
        self._drop(attempt)
        self._refuse(attempt.delivery, attempt.message, _CANCELLED, self._clock.time())

    def _longest_delay_s(self, message: InvocationMessage) -> float:
        """Of a retry: the clock may have been set back since its time was written."""
        retries = self._revision.spec.retries
        return 0.0 if retries is None else retries.delay_before(message.retries_used + 1)


def _has_lost_its_worker(attempt: Attempt) -> bool:
    """Since it was given its slot."""
    return attempt.link.state not in (WorkerState.READY, WorkerState.PARKING, WorkerState.DRAINING)
