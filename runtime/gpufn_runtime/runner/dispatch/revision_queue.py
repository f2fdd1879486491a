"""The heart of the data path: one Revision's calls on this node, in the slots of its workers (workers.py).

1. free slots become credits (intake.py); which slots are free, places.py says
2. a delivery gets the free slot of the least busy worker (arrivals.py), and a Run goes out
3. Result: the slot is free again, the outcome is settled (ends.py), the credit is offered anew
4. every tenth of a second while something runs: touch, and end what is over time
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
from gpufn_runtime.runner.agent_events import Supervision
from gpufn_runtime.runner.attempts.attempt import Arrived, Attempt, AwaitsTurn, Run, may_run_s
from gpufn_runtime.runner.attempts.attempt_index import Attempts
from gpufn_runtime.runner.attempts.finish import Ends
from gpufn_runtime.runner.attempts.metering import Meter
from gpufn_runtime.runner.attempts.settle import Settler
from gpufn_runtime.runner.attempts.start_log import NOTED_AFTER_S, Starts
from gpufn_runtime.runner.dispatch.arrivals import Arrivals
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.dispatch.local_backlog import LASTS_S
from gpufn_runtime.runner.dispatch.pull_credits import TOUCH_EVERY_S
from gpufn_runtime.runner.dispatch.slots_and_backlog import Places
from gpufn_runtime.runner.gpu.turn_waits import Waits
from gpufn_runtime.runner.recovery.abandoned_calls import Departed
from gpufn_runtime.runner.recovery.adoption import Adoption
from gpufn_runtime.runner.recovery.awaiting_exit import Unexplained
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.shared_bodies import NodeParcels
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
        starts: Starts,
        supervision: Supervision,
        nested: NestedCalls,
        departed: Departed,
        output: Output,
        attempts: Attempts,
        parcels: NodeParcels,
        bodies: NodeBodies,
        meter: Meter,
        on_change: Callable[[], None],
        on_room: Callable[[Revision, int], None],
        on_start: Callable[[Attempt], None],
    ) -> None:
        self.revision = revision
        self._clock = clock
        self._attempts = attempts
        self._starts = starts
        self._parcels = parcels
        self._on_start = on_start  # an attempt began of which somebody has to hear
        self._places = Places(revision.spec)
        self._ends = Ends(
            clock=clock, settler=settler, starts=starts, nested=nested, output=output, parcels=parcels,
            attempts=attempts, meter=meter,
        )  # fmt: skip
        self._arrivals = Arrivals(
            bus, revision, self._places,
            clock=clock, settler=settler, starts=starts, departed=departed, parcels=parcels, bodies=bodies,
            attempts=attempts, run=self._run, drop=self._drop, ask=self._ask, on_room=on_room,
            on_fetch=self._keep_ticking,
        )  # fmt: skip
        self._waits = Waits(
            revision, self._places, clock=clock, settler=settler, parcels=parcels, attempts=attempts,
            free=self._ends.free, freed=self._after_end,
        )  # fmt: skip
        self._adoption = Adoption(bus, revision, self._arrivals.ledgers, clock=clock, starts=starts, go_on=self._go_on)
        self._unexplained = Unexplained(self._ends, supervision, clock)
        self.workers = Workers(
            revision, self._places,
            arrivals=self._arrivals, waits=self._waits, ends=self._ends, unexplained=self._unexplained,
            supervision=supervision, nested=nested, output=output, clock=clock,
            on_change=on_change, on_loss=self._keep_ticking,
        )  # fmt: skip
        self._ticking: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0  # monotonic
        self._loop = asyncio.get_running_loop()
        self._started = 0

    def open(self) -> None:
        """Start to pull."""
        self._arrivals.open()

    def close(self) -> None:
        """Pull nothing more, and let the workers go."""
        self._unexplained.leave_all()
        self.workers.close()
        self._arrivals.close()
        if self._ticking is not None:
            self._ticking.cancel()

    @property
    def is_empty(self) -> bool:
        """No worker is assigned here, and no attempt waits for the death of its process."""
        return not self.workers.links and not any(True for _ in self._unexplained)

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
        self._arrivals.on_doorbell(queue)

    def tick(self, now: float) -> None:
        """Each second: a look at the queues, and at workers that are late."""
        self._arrivals.tick(now)
        self.workers.tick(now)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def offer(self, delivery: DirectDelivery) -> None:
        """A call that came by the lane."""
        self._arrivals.offer(delivery)

    def _ask(self, attempt: Attempt, begin: Callable[[], None]) -> None:
        if not self._waits.ask(attempt, begin):
            self._keep_ticking()

    def _run(self, attempt: Attempt, body: bytes) -> None:
        message, link = attempt.message, attempt.link
        started_at, began = self._clock.time(), self._clock.monotonic()
        within_s = may_run_s(message, self.revision.spec.timeout_s, started_at)
        granted = frames.STREAM_WINDOW if message.stream and attempt.method.kind.streams else 0
        attempt.phase = Run(
            started_at=started_at,
            began=began,
            must_end_at=began + within_s,
            is_cold=link.cold_start is not None and self._places.is_cold(message.submitted_at),
            busy_from=link.busy.begin(began),
            granted=granted,
        )
        link.attempts[attempt.number] = attempt
        takes_parcel = not message.stream
        link.send(
            frames.Run(
                attempt.number, message.id, message.method, message.content_type, message.accept, message.attempt,
                granted > 0, granted, attempt.parcel, takes_parcel, started_at + within_s, message.trace,
                attempt.delivery.settled_at,
            ),
            body,
        )  # fmt: skip
        self._go_on(attempt)

    def _go_on(self, attempt: Attempt) -> None:
        """It has begun, here or for the runner before us."""
        self._attempts.add(attempt)
        self._started += 1
        if attempt.is_submitted or (self.revision.spec.queue_timeout_s is not None and not attempt.is_direct):
            self._on_start(attempt)
        self._keep_ticking()

    def _drop(self, attempt: Attempt) -> None:
        """It was over before it began."""
        self._parcels.drop(attempt.link.worker, attempt.parcel)
        self._ends.free(attempt)
        if attempt.link.state.live:
            self._after_end(attempt.link)

    def cancel(self, attempt: Attempt) -> None:
        """Whoever wanted it is gone."""
        match attempt.phase:
            case Arrived():
                attempt.phase = Arrived(is_cancelled=True)
            case AwaitsTurn():
                self._waits.cancel(attempt)
            case Run():
                self._ends.begin(attempt, OutcomeKind.CANCELLED, self._clock.monotonic())

    def withdraw(self, delivery: DirectDelivery) -> None:
        """Whoever had offered it is gone, or has queued it."""
        for attempt in [each for each in self._places.attempts() if each.delivery is delivery]:
            self.cancel(attempt)

    def _keep_ticking(self) -> None:
        if self._ticking is None:
            self._ticked_at = self._clock.monotonic()
            self._ticking = self._loop.call_later(_TICK_S, self._tick_attempts)

    def _tick_attempts(self) -> None:
        self._ticking = ticking = self._loop.call_later(_TICK_S, self._tick_attempts)  # whatever fails in this one
        now = self._clock.monotonic()
        read_until, self._ticked_at = self._ticked_at, now  # a result that came later may not have been read yet
        busy = lasting = False
        for link in list(self._places.links.values()):
            for attempt in list(link.attempts.values()):
                busy = True
                run = attempt.run
                lasting |= now - run.began > LASTS_S
                if read_until >= run.must_end_at:
                    self._ends.begin(attempt, OutcomeKind.TIMED_OUT, read_until)
                if run.ending is not None and read_until >= run.ending.until:
                    self._waits.hand_back(link)
                    self._ends.give_up(attempt)
                    self._arrivals.slot_poisoned()
                    self._after_end(link)
                else:
                    self._touch(attempt, now)
                    if attempt.is_submitted and run.note is None and now - run.began >= NOTED_AFTER_S:
                        self._starts.note(attempt)
        busy |= self._waits.tick(read_until, self._touch)
        busy |= self._unexplained.tick(read_until, self._touch)
        for attempt in self._arrivals.fetching:
            busy = True
            self._touch(attempt, now)
        self._arrivals.close_line_while(lasting)
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
        """A slot is free again, or poisoned."""
        self.workers.slot_freed(link)
        self._arrivals.slot_freed()

    # --- what a link tells of its slots -------------------------------------------------------------------------------

    def on_result(self, attempt: Attempt, result: frames.Result, body: bytes) -> None:
        run_s = self._ends.by_result(attempt, result, body)
        self._places.ended(run_s, len(body))
        self._after_end(attempt.link)

    def on_freed(self, link: WorkerLink, parcel: str = "") -> None:
        self._parcels.drop(link.worker, parcel)
        self._after_end(link)

    def on_unfinished(self, link: WorkerLink, unfinished: tuple[frames.Unfinished, ...]) -> None:
        self._adoption.begin(link, unfinished)
