"""Calls of one Revision as they arrive, from its queues or by the fast path: each runs, waits locally, or is handed
back.

A delivery gets a free slot of the least busy worker. Without a free slot, it waits in the local backlog
(local_backlog.py) while calls are short. Otherwise (a worker with granted credits died or began to drain) it is handed
back.

The fast path (fast_path.py) brings short calls past the queue while none waits there. They take slots whose credits are
still granted to the queue. A delivery for such a slot waits in the backlog too.
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
from gpufn_runtime.runner.attempts.start_log import StartLog
from gpufn_runtime.runner.attempts.start_numbers import first_reason
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.dispatch.local_backlog import Waiting
from gpufn_runtime.runner.dispatch.pull_credits import ACK_WAIT_S, PullCredits
from gpufn_runtime.runner.dispatch.slots_and_backlog import Places
from gpufn_runtime.runner.recovery.abandoned_calls import AbandonedCalls
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies

log = logging.getLogger(__name__)

_MAX_DELIVERIES = 100  # each one is a hand-back, or a runner that died with the call
_CALLER_RECONNECT_S = 1.0  # a caller that lost the bus has reconnected by then
_FETCH_RETRY_S = 1.0  # until the bus is back or memory is free
_CANCELLED = Outcome(OutcomeKind.CANCELLED, InvocationCancelled().info())


class Arrivals:
    """Starts calls as they arrive. `run(attempt, body)` begins an attempt that has a slot. `drop(attempt)` frees the
    slot of an attempt that does not begin. `request_turn(attempt, begin)` calls `begin` when the worker has a turn on
    the GPU. `on_room(revision, calls)` receives the number of calls that the fast path may bring at once. `on_fetch()`
    is called when an attempt begins to wait for its arguments: from then on its lease must be extended."""

    def __init__(
        self,
        bus: Bus,
        revision: Revision,
        places: Places,
        *,
        clock: Clock,
        settler: Settler,
        start_log: StartLog,
        abandoned_calls: AbandonedCalls,
        shared_bodies: NodeSharedBodies,
        bodies: NodeBodies,
        attempts: Attempts,
        run: Callable[[Attempt, bytes], None],
        drop: Callable[[Attempt], None],
        request_turn: Callable[[Attempt, Callable[[], None]], None],
        on_room: Callable[[Revision, int], None],
        on_fetch: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._revision = revision
        self._places = places
        self._backlog = places.backlog
        self._clock = clock
        self._settler = settler
        self._start_log = start_log
        self._abandoned_calls = abandoned_calls
        self._shared_bodies = shared_bodies
        self._bodies = bodies
        self._on_fetch = on_fetch
        self.fetching: set[Attempt] = set()  # attempts whose arguments are being fetched from the bus
        self._attempts = attempts
        self._run = run
        self._drop = drop
        self._request_turn = request_turn
        self._on_room = on_room
        self._methods = {method.name: method for method in revision.spec.methods}
        self._pull_credits = PullCredits(
            bus, revision, room=places.room, capacity=places.capacity, receive=self._receive, clock=clock
        )  # fmt: skip
        self._tasks = Tasks(f"arrivals of {revision}")

    @property
    def ledgers(self) -> Mapping[QueueKind, Ledger]:
        """Ledgers of the deliveries that this runner has received, by queue."""
        return self._pull_credits.ledgers

    def open(self) -> None:
        """Start pulling."""
        self._pull_credits.open()

    def close(self) -> None:
        """Stop pulling, and hand back the local backlog."""
        self._hand_back_backlog()
        self._pull_credits.close()
        self._report_room()

    def tick(self, now: float) -> None:
        """Check the queues; called each second."""
        self._pull_credits.tick(now)
        self._report_room()

    def offer(self, delivery: DirectDelivery) -> None:
        """Run a fast-path call now or soon, or refuse it."""
        has_room = self._places.has_room() and not self._places.must_take_turns
        if has_room and not self._pull_credits.others_wait(delivery.message.priority):
            self._start(delivery, delivery.message, delivery.body)
        else:
            delivery.nak()

    def on_wakeup(self, queue: QueueKind) -> None:
        """Handle a wakeup: a call was queued."""
        self._pull_credits.on_wakeup(queue)

    def poll_queues(self) -> None:
        """Poll the queues for which no credit is granted: calls may wait there."""
        self._pull_credits.poll_all()

    # --- capacity -----------------------------------------------------------------------------------------------------

    def on_more_room(self) -> None:
        """A worker starts to take calls."""
        self._report_room()
        self._pull_credits.offer()

    def on_less_room(self) -> None:
        """A worker takes no more calls."""
        self._pull_credits.shrink()
        self._report_room()

    def slot_freed(self) -> None:
        """A slot is free: start a call from the backlog, or offer a credit."""
        self.serve_backlog()
        self._pull_credits.offer()

    def slot_poisoned(self) -> None:
        self._pull_credits.shrink()

    def set_long_running(self, is_long_running: bool) -> None:
        """Close the backlog while a call runs for long, and hand back the calls that wait in it."""
        if is_long_running is not self._backlog.is_closed:
            self._backlog.is_closed = is_long_running
            self._report_room()
        if is_long_running:
            self._hand_back_backlog()
            self._pull_credits.shrink()

    def _report_room(self) -> None:
        self._on_room(self._revision, self._places.fast_path_room())

    def serve_backlog(self) -> None:
        """Start waiting calls in free slots. Hand the rest back if there are no slots, or calls are not short."""
        while self._backlog and self._places.free:
            call = self._backlog.next()
            if isinstance(call.delivery, DirectDelivery) and call.delivery.is_withdrawn:
                call.delivery.term()
            else:
                self._start(*call)
        if self._backlog and not (self._places.slots and self._backlog.is_short):
            self._hand_back_backlog()

    def _hand_back_backlog(self) -> None:
        while self._backlog:
            with contextlib.suppress(GpufnError):  # without the bus, it is redelivered after ack_wait
                self._hand_back(self._backlog.next())

    # --- single calls -------------------------------------------------------------------------------------------------

    def _receive(self, delivery: Delivery) -> None:
        try:
            message, body = queued_calls.unpack(delivery.payload, delivery.seq)
        except ProtocolMismatch as error:
            log.error("removing %r, which cannot be read: %s", delivery, error)
            delivery.term("unreadable")
            self._pull_credits.offer()
            return
        self._start(delivery, message, body)

    def _start(self, delivery: Delivery | DirectDelivery, message: InvocationMessage, body: bytes) -> None:
        now = self._clock.time()
        if message.not_before > now:
            delivery.nak(min(message.not_before - now, self._max_delay_s(message)))
            self._pull_credits.offer()
        elif now >= message.expires_at(self._revision.spec.queue_timeout_s, delivery.delivered):
            expired = waited_too_long(now - message.submitted_at).info()
            self._refuse(delivery, message, Outcome(OutcomeKind.EXPIRED, expired), now)
        elif (link := self._places.least_busy()) is None:
            self._add_to_backlog(Waiting(delivery, message, body))
        elif delivery.delivered > _MAX_DELIVERIES:
            lost = WorkerLost(f"delivered {delivery.delivered} times without an end").info()
            self._refuse(delivery, message, Outcome(OutcomeKind.LOST, lost), now)
        elif (method := self._methods.get(message.method)) is None:
            unknown = InvalidInput(f"{self._revision} has no method {message.method!r}").info()
            self._refuse(delivery, message, Outcome(OutcomeKind.REJECTED, unknown), now)
        else:
            try:
                parcel = self._shared_bodies.hand_over_arguments(message, link.worker)
            except GpufnError as error:
                self._refuse(delivery, message, Outcome(OutcomeKind.LOST, error.info()), now)
                return
            number, now_s = link.next_attempt_number(), self._clock.monotonic()
            attempt = Attempt(number, delivery, message, method, link, parcel, touched_at=now_s)
            if message.attempt > 1:
                attempt.reason = first_reason(message)
            link.slots.take()
            link.idle_since = None
            if message.reference is not None and not parcel:
                self._start_lookup(attempt, self._fetch(attempt, message.reference))
            else:
                self._request_turn_or_begin(attempt, body)

    def _request_turn_or_begin(self, attempt: Attempt, body: bytes) -> None:
        if attempt.link.seat is None:
            self._begin(attempt, body)
        else:
            self._request_turn(attempt, lambda: self._begin(attempt, body))

    async def _fetch(self, attempt: Attempt, reference: BodyReference) -> None:
        """Fetch arguments that are not in the message, before the attempt requests a turn on the GPU."""
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
            log.warning("cannot fetch the arguments of %s now: %s", attempt.message.id, error)
            self._return(attempt, _FETCH_RETRY_S)
            return
        finally:
            self.fetching.discard(attempt)
        if _has_lost_worker(attempt):
            self._return(attempt)
        elif attempt.is_cancelled:
            self._cancel_unbegun(attempt)
        else:
            self._request_turn_or_begin(attempt, b"")

    def _begin(self, attempt: Attempt, body: bytes) -> None:
        if attempt.is_submitted and (attempt.delivery.delivered > 1 or attempt.message.attempt > 1):
            self._start_lookup(attempt, self._run_unless_ended(attempt, body))
        elif attempt.delivery.delivered > 1 or (
            not attempt.is_direct and self._abandoned_calls.was_caller_away(attempt.message)
        ):
            self._start_lookup(attempt, self._run_if_caller_waits(attempt, body))
        else:
            if attempt.message.may_have_begun:
                self._start_log.number(attempt, None)
            self._run(attempt, body)

    def _start_lookup(self, attempt: Attempt, lookup: Coroutine[Any, Any, None]) -> None:
        self._attempts.add(attempt)
        self._tasks.start(lookup)

    def _refuse(
        self, delivery: Delivery | DirectDelivery, message: InvocationMessage, outcome: Outcome, now: float
    ) -> None:
        self._settler.refuse(delivery, message, outcome, now, self._revision.spec.retention_s)
        self._pull_credits.offer()

    def _add_to_backlog(self, call: Waiting) -> None:
        if self._backlog.is_short and self._places.slots:
            self._backlog.append(call)
        else:
            self._hand_back(call)

    def _hand_back(self, call: Waiting) -> None:
        call.delivery.nak()
        if isinstance(call.delivery, Delivery):
            self._pull_credits.handed_back(call.message)

    async def _run_unless_ended(self, attempt: Attempt, body: bytes) -> None:
        """Run a submitted call unless its record shows that it has ended. An earlier delivery may have ended the
        invocation or queued its next attempt without an ack. A cancel may have ended it between two attempts, or during
        this lookup. Or another runner has it: after a stall NATS redelivers a running call before it reads our
        in-progress acks."""
        record = holder = note = None
        is_repeated = attempt.delivery.delivered > 1
        try:
            record = await call_records.record_of(self._bus, attempt.message.id)
            if is_repeated:
                holder = await call_records.where(self._bus, attempt.message.id)
                note = await self._start_log.read(attempt.message.id, attempt.delivery.seq)
        except GpufnError as error:
            log.warning("cannot look up %s: %s", attempt.message.id, error)
        if _has_lost_worker(attempt):
            self._return(attempt)
        elif record is not None and record[0].state.ended:
            self._drop(attempt)
            self._settler.confirm(attempt.delivery, record[0])
        elif record is not None and record[0].attempt > attempt.message.attempt:
            self._drop(attempt)
            self._settler.drop(attempt.delivery)
        elif attempt.is_cancelled:
            self._cancel_unbegun(attempt)
        elif holder is not None:
            self._return(attempt, ACK_WAIT_S)
        else:
            if is_repeated:
                self._start_log.number(attempt, note)
            self._run(attempt, body)
            if is_repeated:
                self._start_log.note(attempt)

    async def _run_if_caller_waits(self, attempt: Attempt, body: bytes) -> None:
        """Run a call if its caller still waits. The caller may have died with an earlier runner (a nested call), or
        while the call was queued. Or another runner has the call, see `_run_unless_ended`."""
        is_elsewhere, has_caller = attempt.delivery.delivered > 1 and await self._is_elsewhere(attempt), None
        if not is_elsewhere:
            has_caller = await self._abandoned_calls.is_waited_for(attempt.message)
        if _has_lost_worker(attempt):
            self._return(attempt)
        elif is_elsewhere:
            self._return(attempt, ACK_WAIT_S)
        elif has_caller is None:
            self._return(attempt, _CALLER_RECONNECT_S)
        elif attempt.is_cancelled or not has_caller:
            self._cancel_unbegun(attempt)
        else:
            self._start_log.number(attempt, None)
            self._run(attempt, body)

    async def _is_elsewhere(self, attempt: Attempt) -> bool:
        try:
            return await call_records.where(self._bus, attempt.message.id) is not None
        except GpufnError as error:
            log.warning("cannot look up which runner has %s: %s", attempt.message.id, error)
            return False

    def _return(self, attempt: Attempt, delay_s: float = 0) -> None:
        self._drop(attempt)
        with contextlib.suppress(GpufnError):  # without the bus, it is redelivered after ack_wait
            attempt.delivery.nak(delay_s)

    def _cancel_unbegun(self, attempt: Attempt) -> None:
        self._drop(attempt)
        self._refuse(attempt.delivery, attempt.message, _CANCELLED, self._clock.time())

    def _max_delay_s(self, message: InvocationMessage) -> float:
        """Return the maximum delay of a retry. The clock may have been set back since its time was written."""
        retries = self._revision.spec.retries
        return 0.0 if retries is None else retries.delay_before(message.retries_used + 1)


def _has_lost_worker(attempt: Attempt) -> bool:
    """Return whether the worker has ended since the attempt got its slot."""
    return attempt.link.state not in (WorkerState.READY, WorkerState.PARKING, WorkerState.DRAINING)
