"""The heart of the data path: one Revision's deliveries on this node, and the workers that take them.

    1. free slots become credits (intake.py)
    2. a delivery gets the free slot of the least busy worker, and a Run goes out
    3. Result: the slot is free again, the outcome is settled, the credit is offered anew
    4. every tenth of a second while something runs: touch, and end what is over time

While calls are short, a delivery that finds no free slot stands in line (line.py) for the next one. Otherwise, when a
worker died or started to drain under a standing credit, it is handed back.

The lane (lane.py) brings short calls past the queue while none waits there. They take slots whose credits stand in the
queue, so a delivery may come for a slot that is taken: it stands in line, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from gpufn.bus import records
from gpufn.bus.connection import Bus
from gpufn.bus.consumer import Delivery
from gpufn.clock import Clock
from gpufn.errors import (
    DeviceFailed,
    ErrorInfo,
    GpufnError,
    InvalidInput,
    InvocationCancelled,
    InvocationExpired,
    InvocationTimedOut,
    ProtocolMismatch,
    ResultNotEncodable,
    WorkerLost,
)
from gpufn.invocation import Outcome, OutcomeKind
from gpufn.protocol import frames, subjects
from gpufn.protocol.codec import pack
from gpufn.protocol.messages import (
    InvocationMessage,
    ItemReply,
    Progress,
    RevisionTraffic,
    encode,
    unpack_invocation,
)
from gpufn.revision import Revision
from gpufn.spec import CallKind
from gpufn.workers import ColdStart, Exit, StartFailure, WorkerState
from gpufn_runtime.runner.attempt import Attempt, may_run_s
from gpufn_runtime.runner.intake import Intake
from gpufn_runtime.runner.lane import DirectDelivery
from gpufn_runtime.runner.line import LASTS_S, Line, Waiting
from gpufn_runtime.runner.nested import NestedCalls
from gpufn_runtime.runner.output import Output
from gpufn_runtime.runner.parcels import NodeParcels
from gpufn_runtime.runner.settle import Settler
from gpufn_runtime.runner.supervision import Supervision
from gpufn_runtime.runner.worker_link import WorkerLink

log = logging.getLogger(__name__)

_TOUCH_EVERY_S = 2.0
_TICK_S = 0.1
_COMEBACK_S = 30.0  # so long a worker looks for its runner when that was started again
# How long a worker may take to say that it stopped. A sync function cannot be interrupted, so one that ran out of time
# is ended with its worker at once; a cancelled one may be about to end by itself, which keeps its worker warm.
_GRACE_S = {OutcomeKind.TIMED_OUT: 1.0, OutcomeKind.CANCELLED: 5.0}
_MOST_ON_FAILED_GPUS = 3  # deliveries of one call: it may be what makes GPUs fail
_TOO_MANY_DELIVERIES = 100  # each a runner that died with it, or a hand-back


class RevisionQueue:
    def __init__(
        self,
        bus: Bus,
        revision: Revision,
        *,
        clock: Clock,
        settler: Settler,
        supervision: Supervision,
        nested: NestedCalls,
        output: Output,
        running: dict[str, Attempt],
        parcels: NodeParcels,
        inbox: str,
        on_change: Callable[[], None],
        on_room: Callable[[Revision, int], None],
        on_start: Callable[[Attempt], None],
    ) -> None:
        self._bus = bus
        self.revision = revision
        self._clock = clock
        self._settler = settler
        self._supervision = supervision
        self._nested = nested
        self._output = output
        self._running = running  # by invocation id, over all revisions of this runner
        self._parcels = parcels
        self._inbox = inbox
        self._on_change = on_change  # a worker's state changed
        self._on_room = on_room  # how many calls the lane may bring at a time
        self._on_start = on_start  # an attempt of a submitted call began
        self._methods = {method.name: method for method in revision.spec.methods}
        self.links: dict[str, WorkerLink] = {}
        self._intake = Intake(bus, revision, room=self._room, capacity=self._capacity, take=self._take)
        self._ticking: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = self._ended = self._failed = 0
        self._run_seconds = 0.0
        self._line = Line()
        spec = revision.spec
        self._calls_per_run = spec.batch.max_size if spec.batch is not None else 1  # at most; they share its time

    # --- workers come and go ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start to pull."""
        self._intake.open()

    def close(self) -> None:
        """Pull nothing more, and let the workers go on without us: they come back to our successor."""
        for link in self.links.values():
            link.close()
        self._hand_back_line()
        self._tell_room()
        self._intake.close()
        if self._ticking is not None:
            self._ticking.cancel()

    def drain(self, worker: str) -> None:
        if (link := self.links.get(worker)) is not None:
            link.drain()
            self._intake.shrink()
            self._tell_room()

    def remove(self, worker: str) -> None:
        """The worker's assignment is gone; so is the worker, or it will be in a moment."""
        link = self.links.pop(worker, None)
        if link is not None:
            attempts = self._take_all(link)
            self._let_go(link)
            self._end_lost(link, attempts, self._supervision.exit_of(worker))

    def _let_go(self, link: WorkerLink) -> None:
        """Hear nothing more of this worker; what it has asked of the platform goes with it."""
        self._nested.close_all(link)
        link.close()
        self._intake.shrink()
        self._tell_room()
        self._serve_line()

    def _retire(self, link: WorkerLink, why: str) -> None:
        self._let_go(link)
        self._supervision.kill(link.worker, why)

    def traffic(self) -> RevisionTraffic:
        return RevisionTraffic(
            self.revision.function,
            self.revision.number,
            started=self._started,
            ended=self._ended,
            failed=self._failed,
            run_seconds=self._run_seconds,
            direct=sum(attempt.is_direct for attempt in self._attempts())
            + sum(isinstance(waiting.delivery, DirectDelivery) for waiting in self._line),
        )

    def on_doorbell(self) -> None:
        """Async calls may wait."""
        self._intake.on_doorbell()

    def tick(self, now: float) -> None:
        """Each second: watchdogs, workers that do not get ready, and a look at the async queue."""
        self._intake.tick(now)
        self._tell_room()
        for link in list(self.links.values()):
            limit = self.revision.spec.startup_timeout_s
            if link.state is WorkerState.STARTING and now - link.listening_since > max(limit, _COMEBACK_S):
                self.on_start_failed(link, "load", WorkerLost(f"it was not ready after {limit:g} s").info())

    # --- deliveries ---------------------------------------------------------------------------------------------------

    def _count_free(self) -> int:
        return sum(link.free for link in self.links.values())

    def _take(self, delivery: Delivery) -> None:
        try:
            message, body = unpack_invocation(delivery.payload)
        except ProtocolMismatch as error:
            log.error("%r cannot be read and is removed: %s", delivery, error)
            delivery.term("unreadable")
            self._intake.offer()
            return
        self._start(delivery, message, body)

    def offer(self, delivery: DirectDelivery) -> None:
        """A call that came by the lane: run it now or in a moment, or not here."""
        if self._room() > 0 and not self._intake.others_wait:
            self._start(delivery, delivery.message, delivery.body)
        else:
            delivery.nak()

    def _start(self, delivery: Delivery | DirectDelivery, message: InvocationMessage, body: bytes) -> None:
        now = self._clock.time()
        if message.not_before > now:
            delivery.nak(min(message.not_before - now, self._longest_delay_s(message)))
            self._intake.offer()
        elif message.has_expired(self.revision.spec.queue_timeout_s, now):
            expired = InvocationExpired(f"{now - message.submitted_at:.1f} s in the queue were too long").info()
            self._refuse(delivery, message, Outcome(OutcomeKind.EXPIRED, expired), now)
            self._intake.offer()
        elif (link := self._least_busy()) is None:
            self._stand_in_line(Waiting(delivery, message, body))
        elif delivery.delivered > _TOO_MANY_DELIVERIES:
            lost = WorkerLost(f"delivered {delivery.delivered} times without an end").info()
            self._refuse(delivery, message, Outcome(OutcomeKind.LOST, lost), now)
            self._intake.offer()
        elif (method := self._methods.get(message.method)) is None:
            unknown = InvalidInput(f"{self.revision} has no method {message.method!r}").info()
            self._refuse(delivery, message, Outcome(OutcomeKind.REJECTED, unknown), now)
            self._intake.offer()
        else:
            try:
                parcel = self._parcels.give(message, link.worker)
            except GpufnError as error:
                self._refuse(delivery, message, Outcome(OutcomeKind.LOST, error.info()), now)
                self._intake.offer()
                return
            attempt = Attempt(link.next_attempt_number(), delivery, message, method, link)
            attempt.parcel = parcel
            attempt.touched_at = self._clock.monotonic()
            link.slots.take()
            link.idle_since = None
            if attempt.is_submitted and (delivery.delivered > 1 or message.attempt > 1):
                self._spawn(self._run_unless_ended(attempt, body))
            else:
                self._run(attempt, body)

    def _refuse(
        self, delivery: Delivery | DirectDelivery, message: InvocationMessage, outcome: Outcome, now: float
    ) -> None:
        self._settler.refuse(delivery, message, outcome, now, self.revision.spec.retention_s)

    def _stand_in_line(self, waiting: Waiting) -> None:
        if self._line.is_short and self._slots():
            self._line.append(waiting)
        else:
            self._hand_back(waiting)

    def _serve_line(self) -> None:
        while self._line and self._count_free():
            waiting = self._line.next()
            if isinstance(waiting.delivery, DirectDelivery) and waiting.delivery.is_withdrawn:
                waiting.delivery.term()
            else:
                self._start(*waiting)
        if self._line and not (self._slots() and self._line.is_short):
            self._hand_back_line()

    def _hand_back_line(self) -> None:
        while self._line:
            with contextlib.suppress(GpufnError):  # without the bus it comes again by itself
                self._hand_back(self._line.next())

    def _hand_back(self, waiting: Waiting) -> None:
        waiting.delivery.nak()
        if isinstance(waiting.delivery, Delivery):
            self._intake.handed_back(is_submitted=not waiting.message.reply)

    def _attempts(self) -> Iterator[Attempt]:
        for link in self.links.values():
            yield from link.attempts.values()

    def _slots(self) -> int:
        return sum(link.slots.total for link in self.links.values() if link.takes_calls)

    def _longest_line(self) -> int:
        workers = sum(link.takes_calls for link in self.links.values())
        return self._line.longest(workers * self.revision.spec.concurrency)

    def _capacity(self) -> int:
        """Calls that may be here at a time."""
        return self._slots() + self._longest_line()

    def _room(self) -> int:
        """Calls that may come now: for the free slots, and to stand in line."""
        return self._count_free() + self._longest_line() - len(self._line)

    def _tell_room(self) -> None:
        self._on_room(self.revision, self._capacity() if self._line.is_short else 0)

    def _least_busy(self) -> WorkerLink | None:
        best = None
        for link in self.links.values():
            if link.free and (best is None or link.free > best.free):
                best = link
        return best

    async def _run_unless_ended(self, attempt: Attempt, body: bytes) -> None:
        """A delivery that came before may have ended the invocation without being acked, and so may a cancel between
        two attempts."""
        try:
            known = await records.read(self._bus, attempt.message.id)
        except GpufnError as error:
            log.warning("could not read the record of %s: %s", attempt.message.id, error)
            known = None
        if attempt.link.state not in (WorkerState.READY, WorkerState.DRAINING):
            attempt.delivery.nak()  # its worker has gone meanwhile
        elif known is not None and known[0].state.ended:
            self._free(attempt)
            self._settler.confirm(attempt.delivery, known[0])
            self._intake.offer()
        else:
            self._run(attempt, body)

    def _run(self, attempt: Attempt, body: bytes) -> None:
        message, link = attempt.message, attempt.link
        attempt.started_at = self._clock.time()
        attempt.began = self._clock.monotonic()
        attempt.must_end_at = attempt.began + may_run_s(message, self.revision.spec.timeout_s, attempt.started_at)
        attempt.cold = link.cold_start is not None and message.submitted_at < (link.ready_at or 0.0)
        link.attempts[attempt.number] = attempt
        self._running[message.id] = attempt
        self._started += 1
        if message.stream and attempt.method.kind.streams:
            attempt.granted = frames.STREAM_WINDOW
        link.send(
            frames.Run(
                attempt.number, message.id, message.method, message.content_type, message.accept, message.attempt,
                attempt.granted > 0, attempt.granted, attempt.parcel, bool(message.parcels) or attempt.is_submitted,
                attempt.started_at + attempt.must_end_at - attempt.began,
            ),
            body,
        )  # fmt: skip
        if attempt.is_submitted:
            self._on_start(attempt)
        if self._ticking is None:
            self._ticking = self._loop.call_later(_TICK_S, self._tick_attempts)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def on_result(self, attempt: Attempt, result: frames.Result, body: bytes) -> None:
        self._free(attempt)
        held_s = self._clock.monotonic() - attempt.began
        run_s = result.run_s if 0 <= result.run_s <= held_s else held_s
        self._ended += 1
        self._run_seconds += run_s
        self._line.ended(run_s / self._calls_per_run, len(body))
        outcome = _as_decided(attempt, Outcome(result.kind, result.error))
        parcel = ""
        if result.parcel:
            outcome, parcel = self._collect(attempt, outcome, result.parcel)
            body = b""
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            self._failed += 1
            body = b""
            self._log_failure(attempt.link, outcome.error, attempt.message.id)
        if not self._hands_back(attempt, outcome):
            self._settler.settle(
                attempt, outcome, result.content_type, body, parcel=parcel, run_s=run_s, now=self._clock.time()
            )
        self._after_end(attempt.link)

    def _hands_back(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Its GPU failed under it, or under its neighbour: it runs again, on another one."""
        is_gpus = outcome.error is not None and outcome.error.code == DeviceFailed.code
        if not is_gpus or attempt.items or attempt.delivery.delivered >= _MOST_ON_FAILED_GPUS:
            return False
        with contextlib.suppress(GpufnError):  # without the bus it comes again by itself
            attempt.delivery.nak()
        return True

    def _collect(self, attempt: Attempt, outcome: Outcome, parcel: str) -> tuple[Outcome, str]:
        """A large result: its name in the caller's folder, or why the caller cannot have it."""
        worker = attempt.link.worker
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            self._parcels.drop(worker, parcel)
            return outcome, ""
        try:
            if attempt.is_submitted:
                return outcome, self._parcels.keep(worker, parcel)
            return outcome, self._parcels.collect(attempt.message, worker, parcel)
        except ResultNotEncodable as error:
            return Outcome(OutcomeKind.RAISED, error.info()), ""

    def _after_end(self, link: WorkerLink) -> None:
        """A slot is free again: of a worker that drains or is poisoned, or to be offered."""
        if not link.slots.in_use:
            link.idle_since = self._clock.monotonic()
            if link.slots.poisoned:
                self._retire(link, "a call did not end in time")
        if link.state is WorkerState.DRAINING:
            link.drain()
        if self._line:
            self._serve_line()
        self._intake.offer()

    def cancel(self, attempt: Attempt) -> None:
        """Whoever wanted it is gone."""
        self._begin_end(attempt, OutcomeKind.CANCELLED, self._clock.monotonic())

    def _begin_end(self, attempt: Attempt, kind: OutcomeKind, now: float) -> None:
        if attempt.ending is None:
            attempt.ending = kind
            cannot_stop = attempt.method.kind is CallKind.SYNC and kind is OutcomeKind.TIMED_OUT
            attempt.while_ending_until = now if cannot_stop else now + _GRACE_S[kind]
            attempt.link.send(frames.Cancel(attempt.number))
            self._nested.close_of(attempt)

    def _tick_attempts(self) -> None:
        self._ticking = None
        now = self._clock.monotonic()
        busy = lasting = False
        for link in list(self.links.values()):
            for attempt in list(link.attempts.values()):
                busy = True
                lasting |= now - attempt.began > LASTS_S
                if now >= attempt.must_end_at:
                    self._begin_end(attempt, OutcomeKind.TIMED_OUT, now)
                if now >= attempt.while_ending_until:
                    self._give_up(attempt, now)
                elif now - attempt.touched_at >= _TOUCH_EVERY_S:
                    attempt.touched_at = now
                    self._touch(attempt)
        if lasting is not self._line.is_closed:
            self._line.is_closed = lasting
            self._tell_room()
        if lasting:
            self._hand_back_line()
            self._intake.shrink()
        if busy:
            self._ticking = self._loop.call_later(_TICK_S, self._tick_attempts)

    def _touch(self, attempt: Attempt) -> None:
        try:
            attempt.delivery.touch()
        except GpufnError as error:
            log.debug("%r could not be touched: %s", attempt.delivery, error)

    def _give_up(self, attempt: Attempt, now: float) -> None:
        """It did not end in time: its slot is poisoned, and its worker goes when nothing else runs there."""
        link = attempt.link
        del link.attempts[attempt.number]
        self._forget(attempt)
        link.slots.poison()
        self._ended += 1
        self._failed += 1
        outcome = _as_decided(attempt, Outcome(OutcomeKind.LOST))
        self._settler.settle(attempt, outcome, run_s=now - attempt.began, now=self._clock.time())
        self._intake.shrink()
        self._after_end(link)

    def _forget(self, attempt: Attempt) -> None:
        """It may run here a second time by now: from the queue, while the one from the lane is being cancelled."""
        if self._running.get(attempt.message.id) is attempt:
            del self._running[attempt.message.id]

    def _free(self, attempt: Attempt) -> None:
        self._forget(attempt)
        attempt.link.slots.release()

    # --- what else a link tells ---------------------------------------------------------------------------------------

    def on_ready(self, link: WorkerLink) -> None:
        now = self._clock.time()
        if link.ready_at is None:
            link.ready_at = now
            link.idle_since = None if link.slots.in_use else self._clock.monotonic()
            if link.was_ready:  # for the runner before us: its cold start is long over
                link.cold_start = None
            else:
                link.cold_start = self._cold_start(link, now)
                self._supervision.event(link, "ready")
        self._on_change()
        self._tell_room()
        self._intake.offer()
        self.on_doorbell()

    def _cold_start(self, link: WorkerLink, now: float) -> ColdStart:
        """What the agent told of the launch, and what the worker told of itself."""
        inside = link.cold_start or ColdStart()
        started = self._supervision.launch_of(link.worker)
        place_s = started.place_s if started is not None else 0.0
        launch_s = max(0.0, now - link.created_at - place_s - inside.load_s - inside.warm_s)
        launch_s = min(launch_s, self._clock.monotonic() - link.listening_since)  # the agent's clock is not ours
        return ColdStart(
            place_s=place_s,
            launch_s=launch_s,
            load_s=inside.load_s,
            warm_s=inside.warm_s,
            standby=started is not None and started.standby,
        )

    def on_start_failed(self, link: WorkerLink, phase: str, error: ErrorInfo) -> None:
        if link.state is WorkerState.STARTING:
            link.close(WorkerState.FAILED)
            self._retire(link, "it failed to start")
            self._log_failure(link, error)
            self._supervision.event(link, "start_failed", failure=StartFailure(phase, error))
            self._on_change()

    def _log_failure(self, link: WorkerLink, error: ErrorInfo | None, invocation: str = "") -> None:
        """What the caller is told is kept in the function's log as well."""
        if error is not None:
            text = error.traceback or f"{error.code}: {error.message}"
            self._output.publish(link, invocation, "error", text.encode())

    def on_item(self, attempt: Attempt, item: frames.Item, body: bytes) -> None:
        reply = ItemReply(attempt.message.id, attempt.items, item.content_type, self._inbox)
        attempt.items += 1
        try:
            self._bus.publish(attempt.message.reply, pack(reply, body))
        except GpufnError as error:
            log.info("the stream %s breaks off: %s", attempt.message.id, error)
            self._begin_end(attempt, OutcomeKind.CANCELLED, self._clock.monotonic())

    def on_freed(self, link: WorkerLink) -> None:
        self._after_end(link)

    def on_log(self, link: WorkerLink, attempt: Attempt | None, stream: str, text: bytes) -> None:
        self._output.publish(link, attempt.message.id if attempt else "", stream, text)

    def on_progress(self, attempt: Attempt, fraction: float, message: str) -> None:
        attempt.progress = Progress(fraction, message)
        with contextlib.suppress(GpufnError):  # the next one tells it as well
            self._bus.publish(subjects.progress(attempt.message.id), encode(attempt.progress))

    def on_call(self, link: WorkerLink, call: frames.Call, body: bytes) -> None:
        self._nested.open(link, call, body, link.attempts.get(call.parent))

    def on_call_credit(self, link: WorkerLink, call: int, items: int) -> None:
        self._nested.credit(link, call, items)

    def on_close_call(self, link: WorkerLink, call: int) -> None:
        self._nested.close(link, call)

    def on_draining(self, link: WorkerLink) -> None:
        """Somebody else than the controller told it to end."""
        self.drain(link.worker)
        self._on_change()

    def on_lost(self, link: WorkerLink, why: str) -> None:
        """Its socket closed. When it had work, or was wanted, find out why before its callers are told."""
        attempts = self._take_all(link)
        if link.state is WorkerState.DRAINING and not attempts:
            self._let_go(link)  # as told; its @exit hooks have the agent's grace
        else:
            self._retire(link, why)
        self._on_change()
        if attempts:
            self._spawn(self._explain_and_end(link, attempts))

    def _take_all(self, link: WorkerLink) -> list[Attempt]:
        attempts = list(link.attempts.values())
        link.attempts.clear()
        for attempt in attempts:
            link.slots.poison()
            self._forget(attempt)
        return attempts

    async def _explain_and_end(self, link: WorkerLink, attempts: list[Attempt]) -> None:
        self._end_lost(link, attempts, await self._supervision.wait_for_exit(link.worker))

    def _end_lost(self, link: WorkerLink, attempts: list[Attempt], exit_: Exit | None) -> None:
        why = exit_.describe() if exit_ is not None else "closed its connection"
        tail = f"\n{exit_.tail}" if exit_ is not None and exit_.tail else ""
        now = self._clock.monotonic()
        for attempt in attempts:
            self._ended += 1
            self._failed += 1
            what = f"worker {link.worker} {why} while it ran this call{tail}"
            is_gpus = exit_ is not None and exit_.device_fault
            error = DeviceFailed(what).info() if is_gpus else WorkerLost(what).info()
            outcome = _as_decided(attempt, Outcome(OutcomeKind.LOST, error))
            if not self._hands_back(attempt, outcome):
                self._settler.settle(attempt, outcome, run_s=now - attempt.began, now=self._clock.time())

    def _longest_delay_s(self, message: InvocationMessage) -> float:
        """Of a retry: the clock may have been set back since its time was written."""
        retries = self.revision.spec.retries
        return 0.0 if retries is None else retries.delay_before(message.attempt)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=f"queue of {self.revision}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _why_timed_out(attempt: Attempt) -> str:
    limit_s = attempt.link.revision.spec.timeout_s
    if attempt.must_end_at >= attempt.began + limit_s:
        return f"it ran for longer than its timeout of {limit_s:g} s"
    return "it ran when its caller's deadline came"


def _as_decided(attempt: Attempt, outcome: Outcome) -> Outcome:
    """What the runner decided (a timeout, a cancel) holds, whatever the worker said afterwards."""
    match attempt.ending:
        case OutcomeKind.TIMED_OUT:
            return Outcome(OutcomeKind.TIMED_OUT, InvocationTimedOut(_why_timed_out(attempt)).info())
        case OutcomeKind.CANCELLED:
            return Outcome(OutcomeKind.CANCELLED, InvocationCancelled().info())
        case _:
            return outcome
