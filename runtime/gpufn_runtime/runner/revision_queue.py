"""The heart of the data path: one Revision's workers on this node, and what they are given to do.

1. free slots become credits (intake.py); which slots are free, places.py says
2. a delivery gets the free slot of the least busy worker (arrivals.py), and a Run goes out
3. Result: the slot is free again, the outcome is settled (ends.py), the credit is offered anew
4. every tenth of a second while something runs: touch, and end what is over time
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpufn.bus.connection import Bus
from gpufn.clock import Clock
from gpufn.errors import ErrorInfo, GpufnError, WorkerLost
from gpufn.invocation import OutcomeKind
from gpufn.priority import QueueKind
from gpufn.protocol import frames
from gpufn.protocol.launch import RECONNECT_S
from gpufn.protocol.reports import RevisionTraffic, WorkerEventKind
from gpufn.revision import Revision
from gpufn.workers import ColdStart, StartFailure, WorkerState
from gpufn_runtime.runner.arrivals import Arrivals
from gpufn_runtime.runner.attempt import Attempt, may_run_s
from gpufn_runtime.runner.ends import Ends
from gpufn_runtime.runner.intake import TOUCH_EVERY_S
from gpufn_runtime.runner.lane import DirectDelivery
from gpufn_runtime.runner.line import LASTS_S
from gpufn_runtime.runner.meter import Meter
from gpufn_runtime.runner.nested import NestedCalls
from gpufn_runtime.runner.output import Output
from gpufn_runtime.runner.parcels import NodeParcels
from gpufn_runtime.runner.places import Places
from gpufn_runtime.runner.settle import Settler
from gpufn_runtime.runner.supervision import Supervision
from gpufn_runtime.runner.unexplained import Unexplained
from gpufn_runtime.runner.waits import Waits
from gpufn_runtime.runner.worker_link import WorkerLink

log = logging.getLogger(__name__)

_TICK_S = 0.1


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
        meter: Meter,
        on_change: Callable[[], None],
        on_room: Callable[[Revision, int], None],
        on_start: Callable[[Attempt], None],
    ) -> None:
        self.revision = revision
        self._clock = clock
        self._supervision = supervision
        self._nested = nested
        self._output = output
        self._running = running  # by invocation id, over all revisions of this runner
        self._parcels = parcels
        self._on_change = on_change  # a worker's state changed
        self._on_room = on_room  # how many calls the lane may bring at a time
        self._on_start = on_start  # an attempt of a submitted call began
        self._places = Places(revision.spec)
        self.links = self._places.links
        self._ends = Ends(
            clock=clock, settler=settler, nested=nested, output=output, parcels=parcels, running=running, meter=meter
        )  # fmt: skip
        self._arrivals = Arrivals(
            bus, revision, self._places,
            clock=clock, settler=settler, parcels=parcels, running=running,
            run=self._run, drop=self._drop, ask=self._ask,
        )  # fmt: skip
        self._waits = Waits(
            revision, self._places, clock=clock, settler=settler, parcels=parcels, running=running,
            free=self._ends.free, freed=self._after_end,
        )  # fmt: skip
        self._unexplained = Unexplained(self._ends, supervision, clock)
        self._intake = self._arrivals.intake
        self._ticking: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._started = 0

    # --- workers come and go ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start to pull."""
        self._intake.open()

    def close(self) -> None:
        """Pull nothing more, and let the workers go on without us: they come back to our successor."""
        self._unexplained.end_all()
        for link in self.links.values():
            self._leave_gpu(link)
            link.close()
        self._arrivals.close()
        self._tell_room()
        if self._ticking is not None:
            self._ticking.cancel()

    def drain(self, worker: str) -> None:
        if (link := self.links.get(worker)) is None:
            return
        if link.state is WorkerState.STARTING and not link.is_inherited:
            self._retire(link, "it is not wanted any more, and has not started yet")
        else:
            link.drain()
            self._intake.shrink()
            self._tell_room()

    def park(self, worker: str, host_bytes: int) -> None:
        if (link := self.links.get(worker)) is not None:
            link.park_bytes = host_bytes
            link.park(self._clock.monotonic())
            self._intake.shrink()
            self._tell_room()

    def resume(self, worker: str) -> None:
        """Nothing when nobody wanted it parked."""
        if (link := self.links.get(worker)) is not None:
            link.resume(self._clock.monotonic())
            self._tell_room()
            self._intake.offer()

    def remove(self, worker: str) -> None:
        """The worker's assignment is gone; so is the worker, or it will be in a moment."""
        link = self.links.pop(worker, None)
        if link is not None:
            self._leave_gpu(link)
            attempts = self._ends.take_all(link)
            self._let_go(link)
            self._ends.with_worker(link, attempts, self._supervision.exit_of(worker))
            self._unexplained.end(worker)
            link.remove_socket()

    def _let_go(self, link: WorkerLink) -> None:
        """Hear nothing more of this worker; what it has asked of the platform goes with it."""
        self._nested.close_all(link)
        self._leave_gpu(link)
        link.close()
        self._intake.shrink()
        self._tell_room()
        self._arrivals.serve_line()

    def _leave_gpu(self, link: WorkerLink) -> None:
        """Before what runs there ends, or its end would begin what waits."""
        self._waits.hand_back(link)
        if link.seat is not None:
            link.seat.leave()

    def _retire(self, link: WorkerLink, why: str) -> None:
        self._let_go(link)
        self._supervision.kill(link.worker, why)

    def traffic(self) -> RevisionTraffic:
        return RevisionTraffic(
            self.revision.function,
            self.revision.number,
            started=self._started,
            ended=self._ends.ended,
            failed=self._ends.failed,
            run_seconds=self._ends.run_seconds,
            gpu_seconds=self._ends.gpu_seconds,
            direct=sum(
                attempt.is_direct and not attempt.is_cancelled
                for attempt in (*self._places.attempts(), *self._unexplained)
            )
            + sum(isinstance(waiting.delivery, DirectDelivery) for waiting in self._places.line),
        )

    def on_doorbell(self, queue: QueueKind) -> None:
        """A call was queued there."""
        self._intake.on_doorbell(queue)

    def tick(self, now: float) -> None:
        """Each second: watchdogs, workers that do not get ready, and a look at the queues."""
        self._intake.tick(now)
        self._tell_room()
        for link in list(self.links.values()):
            limit = self.revision.spec.startup_timeout_s
            within_s = max(limit, RECONNECT_S) if link.is_inherited else limit
            if link.state is WorkerState.STARTING and now - link.listening_since > within_s:
                self.on_start_failed(link, "load", WorkerLost(f"it was not ready after {limit:g} s").info())
            elif link.told_at is not None and now - link.told_at > limit:
                phase = "park" if link.state is WorkerState.PARKING else "resume"
                self.on_start_failed(link, phase, WorkerLost(f"it did not {phase} within {limit:g} s").info())

    def _tell_room(self) -> None:
        self._on_room(self.revision, self._places.lane_room())

    # --- attempts -----------------------------------------------------------------------------------------------------

    def offer(self, delivery: DirectDelivery) -> None:
        """A call that came by the lane."""
        self._arrivals.offer(delivery)

    def _ask(self, attempt: Attempt, begin: Callable[[], None]) -> None:
        if not self._waits.ask(attempt, begin):
            self._keep_ticking()

    def _run(self, attempt: Attempt, body: bytes) -> None:
        message, link = attempt.message, attempt.link
        attempt.started_at = self._clock.time()
        attempt.began = self._clock.monotonic()
        attempt.busy_from = link.busy.begin(attempt.began)
        attempt.must_end_at = attempt.began + may_run_s(message, self.revision.spec.timeout_s, attempt.started_at)
        attempt.cold = link.cold_start is not None and self._places.is_cold(message.submitted_at)
        link.attempts[attempt.number] = attempt
        self._running[message.id] = attempt
        self._started += 1
        if message.stream and attempt.method.kind.streams:
            attempt.granted = frames.STREAM_WINDOW
        takes_parcel = attempt.is_submitted or self._parcels.reach(message)
        link.send(
            frames.Run(
                attempt.number, message.id, message.method, message.content_type, message.accept, message.attempt,
                attempt.granted > 0, attempt.granted, attempt.parcel, takes_parcel,
                attempt.started_at + attempt.must_end_at - attempt.began, message.trace,
            ),
            body,
        )  # fmt: skip
        if attempt.is_submitted:
            self._on_start(attempt)
        self._keep_ticking()

    def _drop(self, attempt: Attempt) -> None:
        """It was over before it began."""
        self._ends.free(attempt)
        if attempt.link.state.live:
            self._after_end(attempt.link)

    def cancel(self, attempt: Attempt) -> None:
        """Whoever wanted it is gone."""
        if attempt.waits_on:
            self._waits.cancel(attempt)
        elif attempt.is_looked_up:
            attempt.ending = OutcomeKind.CANCELLED  # and it will not begin
        else:
            self._ends.begin(attempt, OutcomeKind.CANCELLED, self._clock.monotonic())

    def withdraw(self, delivery: DirectDelivery) -> None:
        """Whoever had offered it is gone, or has queued it."""
        for attempt in [each for each in self._places.attempts() if each.delivery is delivery]:
            self.cancel(attempt)

    def _keep_ticking(self) -> None:
        if self._ticking is None:
            self._ticking = self._loop.call_later(_TICK_S, self._tick_attempts)

    def _tick_attempts(self) -> None:
        self._ticking = ticking = self._loop.call_later(_TICK_S, self._tick_attempts)  # whatever fails in this one
        now = self._clock.monotonic()
        busy = lasting = False
        for link in list(self.links.values()):
            for attempt in list(link.attempts.values()):
                busy = True
                lasting |= now - attempt.began > LASTS_S
                if now >= attempt.must_end_at:
                    self._ends.begin(attempt, OutcomeKind.TIMED_OUT, now)
                if now >= attempt.while_ending_until:
                    self._waits.hand_back(link)
                    self._ends.give_up(attempt)
                    self._intake.shrink()
                    self._after_end(link)
                else:
                    self._touch(attempt, now)
        busy |= self._waits.tick(now, self._touch)
        busy |= self._unexplained.tick(now, self._touch)
        line = self._places.line
        if lasting is not line.is_closed:
            line.is_closed = lasting
            self._tell_room()
        if lasting:
            self._arrivals.hand_back_line()
            self._intake.shrink()
        if not busy:
            ticking.cancel()
            self._ticking = None

    def _touch(self, attempt: Attempt, now: float) -> None:
        if now - attempt.touched_at < TOUCH_EVERY_S:
            return
        attempt.touched_at = now
        try:
            attempt.delivery.touch()
        except GpufnError as error:
            log.debug("%r could not be touched: %s", attempt.delivery, error)

    def _after_end(self, link: WorkerLink) -> None:
        """A slot is free again: of a worker that drains or is poisoned, or to be offered."""
        if not link.slots.in_use:
            link.idle_since = self._clock.monotonic()
            if link.slots.poisoned:
                self._retire(link, "a call did not end in time")
        if link.state is WorkerState.DRAINING:
            link.drain()
        elif link.state is WorkerState.PARKING:
            link.park(self._clock.monotonic())
        if self._places.line:
            self._arrivals.serve_line()
        self._intake.offer()

    # --- what a link tells of its attempts ----------------------------------------------------------------------------

    def on_result(self, attempt: Attempt, result: frames.Result, body: bytes) -> None:
        run_s = self._ends.by_result(attempt, result, body)
        self._places.ended(run_s, len(body))
        self._after_end(attempt.link)

    def on_freed(self, link: WorkerLink) -> None:
        self._after_end(link)

    # --- what a link tells of its worker ------------------------------------------------------------------------------

    def on_ready(self, link: WorkerLink) -> None:
        if link.ready_at is None:
            link.ready_at = since = self._clock.time()
            link.idle_since = None if link.slots.in_use else self._clock.monotonic()
            if link.told_at is not None:
                link.cold_start = ColdStart(resume_s=self._clock.monotonic() - link.told_at)
            elif link.was_ready:  # for the runner before us: its cold start is long over
                link.cold_start = None
                since = 0.0
            else:
                link.cold_start = self._supervision.cold_start(link)
            link.told_at = None
            self._places.became_ready(link, since)
            if link.cold_start is not None:
                self._supervision.event(link, WorkerEventKind.READY)
        if link.seat is not None:
            link.seat.join()
        if link.is_asked_to_park:
            link.park(self._clock.monotonic())
        self._on_change()
        self._tell_room()
        self._intake.offer()
        self._intake.look()

    def on_start_failed(self, link: WorkerLink, phase: str, error: ErrorInfo) -> None:
        if link.state in (WorkerState.STARTING, WorkerState.PARKING, WorkerState.RESUMING):
            link.close(WorkerState.FAILED)
            self._retire(link, "it failed to start")
            self._ends.log_failure(link, error)
            self._supervision.event(link, WorkerEventKind.START_FAILED, failure=StartFailure(phase, error))
            self._on_change()

    def on_parked(self, link: WorkerLink) -> None:
        """What was asked of it meanwhile counts."""
        self._leave_gpu(link)
        if link.idle_since is None:
            link.idle_since = self._clock.monotonic()
        self._on_change()
        if link.is_asked_to_drain:
            link.drain()
        elif not link.is_asked_to_park:
            link.resume(self._clock.monotonic())

    def on_not_parked(self, link: WorkerLink, error: ErrorInfo, needs_bytes: int) -> None:
        """It ends, as it would have without parking."""
        self._output.publish(link, "", "error", f"not parked: {error.traceback or error.message}".encode())
        failure = StartFailure("park", error)
        self._supervision.event(link, WorkerEventKind.NOT_PARKED, failure=failure, needs_bytes=needs_bytes)
        self.on_draining(link)

    def on_draining(self, link: WorkerLink) -> None:
        """Somebody else than the controller told it to end."""
        self.drain(link.worker)
        self._on_change()

    def on_lost(self, link: WorkerLink, why: str) -> None:
        """Its socket closed. When it had work, or was wanted, find out why before its callers are told."""
        self._leave_gpu(link)
        attempts = self._ends.take_all(link)
        if link.state is WorkerState.DRAINING and not attempts:
            self._let_go(link)  # as told; its @exit hooks have the agent's grace
        else:
            self._retire(link, why)
        self._on_change()
        if attempts:
            self._unexplained.add(link, attempts)
            self._keep_ticking()
