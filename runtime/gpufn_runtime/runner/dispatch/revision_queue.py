"""One Revision's calls on this node, in the slots of its workers (workers.py). The core of the data path.

1. Free slots become credits (pull_credits.py); slots_and_backlog.py counts the free slots.
2. A delivery gets a free slot of the least busy worker (arrivals.py), and Run is sent to the worker.
3. When the Result arrives, the slot is freed, the outcome is settled (finish.py), and the credit is offered again.
4. Every 0.1 s while calls run: extend the leases of deliveries, and end attempts that are overdue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import GpufnError
from gpufn_core.protocol import frames
from gpufn_core.protocol.reports import RevisionTraffic
from gpufn_core.spec.priority import QueueKind
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.agent_events import AgentEvents
from gpufn_runtime.runner.attempts.attempt import Arrived, Attempt, AwaitsTurn, Run, may_run_s
from gpufn_runtime.runner.attempts.attempt_index import Attempts
from gpufn_runtime.runner.attempts.finish import AttemptFinisher
from gpufn_runtime.runner.attempts.metering import Meter
from gpufn_runtime.runner.attempts.settle import Settler
from gpufn_runtime.runner.attempts.start_log import RECORDED_AFTER_S, StartLog
from gpufn_runtime.runner.dispatch.arrivals import Arrivals
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.dispatch.local_backlog import LONG_RUNNING_S
from gpufn_runtime.runner.dispatch.pull_credits import TOUCH_EVERY_S
from gpufn_runtime.runner.dispatch.slots_and_backlog import Places
from gpufn_runtime.runner.gpu.turn_waits import TurnWaits
from gpufn_runtime.runner.recovery.abandoned_calls import AbandonedCalls
from gpufn_runtime.runner.recovery.adoption import Adoption
from gpufn_runtime.runner.recovery.awaiting_exit import AwaitingExit
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies
from gpufn_runtime.runner.workers.worker_link import WorkerLink
from gpufn_runtime.runner.workers.workers import Workers

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
        start_log: StartLog,
        agent_events: AgentEvents,
        nested: NestedCalls,
        abandoned_calls: AbandonedCalls,
        output: Output,
        attempts: Attempts,
        shared_bodies: NodeSharedBodies,
        bodies: NodeBodies,
        meter: Meter,
        on_change: Callable[[], None],
        on_room: Callable[[Revision, int], None],
        on_start: Callable[[Attempt], None],
    ) -> None:
        self.revision = revision
        self._clock = clock
        self._attempts = attempts
        self._start_log = start_log
        self._shared_bodies = shared_bodies
        self._on_start = on_start  # called when an attempt began whose start must be announced
        self._places = Places(revision.spec)
        self._finisher = AttemptFinisher(
            clock=clock, settler=settler, start_log=start_log, nested=nested, output=output,
            shared_bodies=shared_bodies, attempts=attempts, meter=meter,
        )  # fmt: skip
        self._arrivals = Arrivals(
            bus, revision, self._places,
            clock=clock, settler=settler, start_log=start_log, abandoned_calls=abandoned_calls,
            shared_bodies=shared_bodies, bodies=bodies, attempts=attempts, run=self._run, drop=self._drop,
            request_turn=self._request_turn, on_room=on_room, on_fetch=self._ensure_ticking,
        )  # fmt: skip
        self._turn_waits = TurnWaits(
            revision, self._places, clock=clock, settler=settler, shared_bodies=shared_bodies, attempts=attempts,
            free=self._finisher.free, on_freed=self._after_end,
        )  # fmt: skip
        self._adoption = Adoption(
            bus, revision, self._arrivals.ledgers, clock=clock, start_log=start_log, on_adopted=self._on_begun
        )
        self._awaiting_exit = AwaitingExit(self._finisher, agent_events, clock)
        self.workers = Workers(
            revision, self._places,
            arrivals=self._arrivals, turn_waits=self._turn_waits, finisher=self._finisher,
            awaiting_exit=self._awaiting_exit, agent_events=agent_events, nested=nested, output=output, clock=clock,
            on_change=on_change, on_loss=self._ensure_ticking,
        )  # fmt: skip
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0  # monotonic
        self._loop = asyncio.get_running_loop()
        self._started = 0

    def open(self) -> None:
        """Start pulling."""
        self._arrivals.open()

    def close(self) -> None:
        """Stop pulling, and disconnect from the workers, which live on."""
        self._awaiting_exit.drop_all()
        self.workers.close()
        self._arrivals.close()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_empty(self) -> bool:
        """Whether no worker is assigned here and no attempt waits for the death of its process."""
        return not self.workers.links and not any(True for _ in self._awaiting_exit)

    def traffic(self) -> RevisionTraffic:
        return RevisionTraffic(
            self.revision.function,
            self.revision.number,
            started=self._started,
            ended=self._finisher.ended,
            failed=self._finisher.failed,
            run_seconds=self._finisher.run_seconds,
            gpu_seconds=self._finisher.gpu_seconds,
            direct=sum(
                attempt.is_direct and not attempt.is_cancelled
                for attempt in (*self._places.attempts(), *self._awaiting_exit)
            )
            + sum(isinstance(waiting.delivery, DirectDelivery) for waiting in self._places.backlog),
        )

    def on_wakeup(self, queue: QueueKind) -> None:
        """Handle a wakeup: a call was queued."""
        self._arrivals.on_wakeup(queue)

    def tick(self, now: float) -> None:
        """Check the queues, and workers that are late. Called each second."""
        self._arrivals.tick(now)
        self.workers.tick(now)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def offer(self, delivery: DirectDelivery) -> None:
        """Accept a call from the fast path."""
        self._arrivals.offer(delivery)

    def _request_turn(self, attempt: Attempt, begin: Callable[[], None]) -> None:
        if not self._turn_waits.request(attempt, begin):
            self._ensure_ticking()

    def _run(self, attempt: Attempt, body: bytes) -> None:
        message, link = attempt.message, attempt.link
        started_at, began = self._clock.time(), self._clock.monotonic()
        timeout_s = may_run_s(message, self.revision.spec.timeout_s, started_at)
        granted = frames.STREAM_WINDOW if message.stream and attempt.method.kind.streams else 0
        attempt.phase = Run(
            started_at=started_at,
            began=began,
            must_end_at=began + timeout_s,
            is_cold=link.cold_start is not None and self._places.is_cold(message.submitted_at),
            busy_from=link.busy.begin(began),
            granted=granted,
        )
        link.attempts[attempt.number] = attempt
        takes_parcel = not message.stream
        link.send(
            frames.Run(
                attempt.number, message.id, message.method, message.content_type, message.accept, message.attempt,
                granted > 0, granted, attempt.parcel, takes_parcel, started_at + timeout_s, message.trace,
                attempt.delivery.settled_at,
            ),
            body,
        )  # fmt: skip
        self._on_begun(attempt)

    def _on_begun(self, attempt: Attempt) -> None:
        """Handle an attempt that has begun, here or under the previous runner."""
        self._attempts.add(attempt)
        self._started += 1
        if attempt.is_submitted or (self.revision.spec.queue_timeout_s is not None and not attempt.is_direct):
            self._on_start(attempt)
        self._ensure_ticking()

    def _drop(self, attempt: Attempt) -> None:
        """Free the slot of an attempt that does not begin."""
        self._shared_bodies.drop(attempt.link.worker, attempt.parcel)
        self._finisher.free(attempt)
        if attempt.link.state.live:
            self._after_end(attempt.link)

    def cancel(self, attempt: Attempt) -> None:
        """Cancel an attempt that has no caller left."""
        match attempt.phase:
            case Arrived():
                attempt.phase = Arrived(is_cancelled=True)
            case AwaitsTurn():
                self._turn_waits.cancel(attempt)
            case Run():
                self._finisher.begin(attempt, OutcomeKind.CANCELLED, self._clock.monotonic())

    def withdraw(self, delivery: DirectDelivery) -> None:
        """Cancel a fast-path call: its gateway is gone, or has queued it."""
        for attempt in [attempt for attempt in self._places.attempts() if attempt.delivery is delivery]:
            self.cancel(attempt)

    def _ensure_ticking(self) -> None:
        if self._timer is None:
            self._ticked_at = self._clock.monotonic()
            self._timer = self._loop.call_later(_TICK_S, self._tick_attempts)

    def _tick_attempts(self) -> None:
        self._timer = timer = self._loop.call_later(_TICK_S, self._tick_attempts)  # first, in case this tick fails
        now = self._clock.monotonic()
        cutoff, self._ticked_at = self._ticked_at, now  # results that arrived later may not have been read yet
        busy = has_long_running = False
        for link in list(self._places.links.values()):
            for attempt in list(link.attempts.values()):
                busy = True
                run = attempt.run
                has_long_running |= now - run.began > LONG_RUNNING_S
                if cutoff >= run.must_end_at:
                    self._finisher.begin(attempt, OutcomeKind.TIMED_OUT, cutoff)
                if run.ending is not None and cutoff >= run.ending.until:
                    self._turn_waits.hand_back(link)
                    self._finisher.abandon(attempt)
                    self._arrivals.slot_poisoned()
                    self._after_end(link)
                else:
                    self._touch(attempt, now)
                    if attempt.is_submitted and run.note is None and now - run.began >= RECORDED_AFTER_S:
                        self._start_log.note(attempt)
        busy |= self._turn_waits.tick(cutoff, self._touch)
        busy |= self._awaiting_exit.tick(cutoff, self._touch)
        for attempt in self._arrivals.fetching:
            busy = True
            self._touch(attempt, now)
        self._arrivals.set_long_running(has_long_running)
        if not busy:
            timer.cancel()
            self._timer = None

    def _touch(self, attempt: Attempt, now: float) -> None:
        if now - attempt.touched_at < TOUCH_EVERY_S:
            return
        attempt.touched_at = now
        try:
            attempt.delivery.touch()
        except GpufnError as error:
            log.debug("cannot extend the lease of %r: %s", attempt.delivery, error)

    def _after_end(self, link: WorkerLink) -> None:
        """Handle a slot that is free again, or poisoned."""
        self.workers.slot_freed(link)
        self._arrivals.slot_freed()

    # --- events of links ----------------------------------------------------------------------------------------------

    def on_result(self, attempt: Attempt, result: frames.Result, body: bytes) -> None:
        run_s = self._finisher.by_result(attempt, result, body)
        self._places.ended(run_s, len(body))
        self._after_end(attempt.link)

    def on_freed(self, link: WorkerLink, parcel: str = "") -> None:
        self._shared_bodies.drop(link.worker, parcel)
        self._after_end(link)

    def on_unfinished(self, link: WorkerLink, unfinished: tuple[frames.Unfinished, ...]) -> None:
        self._adoption.begin(link, unfinished)
