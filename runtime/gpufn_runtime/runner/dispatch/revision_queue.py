"""One Revision's calls on this node: the edge of the state machine in `core/machine.py`.

1. Deliveries, frames of workers, reports of the agent and the clock become events.
2. `RevisionMachine.handle` decides; its actions are executed here, in order.
3. An action may cause further events. They are handled after the actions of the event before them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from gpufn_core.domain.invocation import Outcome, OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import (
    ArtifactUnavailable,
    BusUnavailable,
    ErrorInfo,
    GpufnError,
    PlatformError,
    ProtocolMismatch,
    ResultNotEncodable,
)
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.reports import RevisionTraffic
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import queued_calls
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.records import call_records
from gpufn_runtime.runner.agent_events import AgentEvents
from gpufn_runtime.runner.attempts.attempt_index import Attempts
from gpufn_runtime.runner.attempts.metering import Meter
from gpufn_runtime.runner.attempts.settle import Settler
from gpufn_runtime.runner.attempts.start_log import StartLog
from gpufn_runtime.runner.attempts.tracing import Tracing
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.machine import RevisionMachine
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.dispatch.pull_credits import PullCredits
from gpufn_runtime.runner.recovery.abandoned_calls import AbandonedCalls
from gpufn_runtime.runner.recovery.adoption import Adoption
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies
from gpufn_runtime.runner.workers.worker_link import WorkerLink
from gpufn_runtime.runner.workers.workers import Workers

log = logging.getLogger(__name__)

_TICK_S = 0.1
_SUCCEEDED = OutcomeKind.SUCCEEDED  # each call needs it, and Python looks up a member of an enum slowly


@dataclass(eq=False, repr=False)
class RevisionQueue:
    """`on_limit(revision, calls)` receives the limit of the fast path. `on_start(attempt)` is called for a start that
    must be announced, `on_change()` when the state of a worker changes."""

    bus: Bus
    revision: Revision
    _: KW_ONLY
    clock: Clock
    settler: Settler
    start_log: StartLog
    tracing: Tracing
    agent_events: AgentEvents
    nested: NestedCalls
    abandoned_calls: AbandonedCalls
    output: Output
    attempts: Attempts
    shared_bodies: NodeSharedBodies
    bodies: NodeBodies
    meter: Meter
    on_change: Callable[[], None]
    on_limit: Callable[[Revision, int], None]
    on_start: Callable[[Attempt], None]

    def __post_init__(self) -> None:
        self._machine: RevisionMachine[WorkerLink] = RevisionMachine(self.revision)
        self._capacity = self._machine.capacity
        self.credits = PullCredits(
            self.bus, self.revision, room=self._capacity.room, capacity=self._capacity.total,
            receive=self._receive, clock=self.clock,
        )  # fmt: skip
        adoption = Adoption(
            self.bus, self.revision, self.credits.ledgers, start_log=self.start_log, dispatch=self.dispatch
        )
        self.workers = Workers(
            self.revision, self._capacity.workers, dispatch=self.dispatch, on_unfinished=adoption.begin,
            poll_queues=self.credits.poll_all, log_failure=self._log_failure, agent_events=self.agent_events,
            nested=self.nested, output=self.output, clock=self.clock, on_change=self.on_change,
        )  # fmt: skip
        self._execute = self._handlers()
        self._events: deque[events.Event] = deque()
        self._is_dispatching = False
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_at = 0.0  # monotonic
        self._loop = asyncio.get_running_loop()
        self._tasks = Tasks(f"lookups of {self.revision}")
        self.credits.open()

    def close(self) -> None:
        """Stop pulling, and disconnect from the workers, which live on."""
        self.workers.close()
        self.dispatch(events.Closed())
        self.credits.close()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_empty(self) -> bool:
        """Whether no worker is assigned here and no attempt waits for the death of its process."""
        return not self.workers.links and not self._machine.awaits_exits

    def traffic(self) -> RevisionTraffic:
        machine, totals = self._machine, self._machine.totals
        totals.counts_durations = self.nested.directory.is_split(self.revision.function)
        if not totals.counts_durations:
            totals.durations.clear()
        return RevisionTraffic(
            self.revision.function,
            self.revision.number,
            started=totals.started,
            ended=totals.ended,
            failed=totals.failed,
            errors=totals.errors,
            durations=dict(totals.durations),
            batches=dict(totals.batches),
            run_seconds=totals.run_seconds,
            gpu_seconds=totals.gpu_seconds,
            direct=sum(attempt.is_direct and not attempt.is_cancelled for attempt in machine.attempts())
            + sum(call.delivery.is_direct for call in self._capacity.backlog),
        )

    # --- events -------------------------------------------------------------------------------------------------------

    def dispatch(self, event: events.Event) -> None:
        """Handle the event, and execute its actions. An event that an action causes is handled after them."""
        self._events.append(event)
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        finally:
            self._is_dispatching = False
            if self._timer is None and self._machine.is_busy:
                self._ticked_at = self.clock.monotonic()
                self._timer = self._loop.call_later(_TICK_S, self._on_timer)

    def _handle(self, event: events.Event) -> None:
        clock, execute = self.clock, self._execute
        for action in self._machine.handle(event, events.Now(clock.monotonic(), clock.time())):
            try:
                execute[type(action)](action)
            except BusUnavailable as error:  # NATS redelivers the call after `ack_wait`
                log.debug("%s: %s", type(action).__name__, error)
            except Exception:  # the rest of the actions must be executed
                log.exception("cannot execute %s", type(action).__name__)

    def _on_timer(self) -> None:
        self._timer = None
        # Frames that arrived after the tick before may not have been read yet.
        cutoff, self._ticked_at = self._ticked_at, self.clock.monotonic()
        if self._machine.is_busy:
            self._timer = self._loop.call_later(_TICK_S, self._on_timer)  # first, in case this tick fails
        self.dispatch(events.Ticked(cutoff))

    def tick(self, now: float) -> None:
        """Check the queues, and workers that are late. Called each second."""
        self.credits.tick(now)
        self._report_limit()
        self.workers.tick(now)

    def offer(self, delivery: DirectDelivery) -> None:
        """Run a fast-path call now or soon, or refuse it."""
        if self.credits.others_wait(delivery.message.priority) or self._capacity.must_take_turns:
            delivery.nak()
        else:
            self.dispatch(events.Arrived(delivery, delivery.message, delivery.body))

    def _receive(self, delivery: Delivery) -> None:
        try:
            message, body = queued_calls.unpack(delivery.payload, delivery.seq)
        except ProtocolMismatch as error:
            log.error("removing %r, which cannot be read: %s", delivery, error)
            delivery.term("unreadable")
            self.credits.offer()
            return
        self.dispatch(events.Arrived(delivery, message, body, self.abandoned_calls.was_caller_away(message)))

    # --- actions ------------------------------------------------------------------------------------------------------
    # Each lookup is answered, whatever fails: an attempt without an answer would keep its slot and its call for good.

    def _get_arguments(self, action: actions.GetArguments) -> None:
        attempt, message = action.attempt, action.attempt.message
        try:
            shared_body = self.shared_bodies.hand_over_arguments(message, attempt.worker.id)
        except GpufnError as error:
            self.dispatch(events.ArgumentsFailed(attempt, error.info(), is_lost=True))
            return
        if message.reference is not None and not shared_body:
            self._look_up(attempt, self._fetch_arguments)
        else:
            self.dispatch(events.ArgumentsReady(attempt, shared_body))

    def _look_up(self, attempt: Attempt, lookup: Callable[[Attempt], Coroutine[Any, Any, None]]) -> None:
        self.attempts.add(attempt)
        self._tasks.start(lookup(attempt))

    async def _fetch_arguments(self, attempt: Attempt) -> None:
        reference = attempt.message.reference
        assert reference is not None
        try:
            shared_body = await self.bodies.fetch(subjects.ARGUMENT_FILES, reference, attempt.worker.id)
        except ArtifactUnavailable as error:
            self.dispatch(events.ArgumentsFailed(attempt, error.info(), is_lost=True))
        except GpufnError as error:
            log.warning("cannot fetch the arguments of %s now: %s", attempt.message.id, error)
            self.dispatch(events.ArgumentsFailed(attempt, error.info(), is_lost=False))
        except Exception:
            log.exception("cannot fetch the arguments of %s; the call returns to its queue", attempt.message.id)
            self.dispatch(events.ArgumentsFailed(attempt, PlatformError().info(), is_lost=False))
        else:
            self.dispatch(events.ArgumentsReady(attempt, shared_body))

    def _request_turn(self, action: actions.RequestTurn) -> None:
        attempt = action.attempt
        seat = attempt.worker.seat
        assert seat is not None
        self.attempts.add(attempt)
        seat.request(attempt, lambda: self.dispatch(events.TurnGranted(attempt)))

    def _revoke_turns(self, action: actions.RevokeTurns) -> None:
        seat = action.worker.seat
        if seat is not None:
            seat.remove_waiting()  # the machine returns their calls itself

    async def _look_up_record(self, attempt: Attempt) -> None:
        invocation, record, is_elsewhere, note = attempt.message.id, None, False, None
        try:
            record = await call_records.record_of(self.bus, invocation)
            if attempt.is_repeated:
                is_elsewhere = await call_records.locate(self.bus, invocation) is not None
                note = await self.start_log.read(invocation, attempt.delivery.seq)
        except GpufnError as error:
            log.warning("cannot look up %s: %s", invocation, error)
        except Exception:
            log.exception("cannot look up %s; the call returns to its queue", invocation)
            is_elsewhere = True
        call_record = record[0] if record is not None else None
        self.dispatch(events.RecordChecked(attempt, call_record, is_elsewhere, note))

    async def _look_up_caller(self, attempt: Attempt) -> None:
        is_elsewhere, is_waited_for = False, None
        try:
            if attempt.is_repeated:
                is_elsewhere = await self._is_elsewhere(attempt.message.id)
            if not is_elsewhere:
                is_waited_for = await self.abandoned_calls.is_waited_for(attempt.message)
        except Exception:
            log.exception("cannot look up the caller of %s; the call returns to its queue", attempt.message.id)
        self.dispatch(events.CallerChecked(attempt, is_waited_for, is_elsewhere))

    async def _is_elsewhere(self, invocation: str) -> bool:
        try:
            return await call_records.locate(self.bus, invocation) is not None
        except GpufnError as error:
            log.warning("cannot look up which runner has %s: %s", invocation, error)
            return False

    def _send_run(self, action: actions.SendRun) -> None:
        self.attempts.add(action.attempt)
        action.attempt.worker.send(action.run, action.body)

    def _send_stop(self, action: actions.SendStop) -> None:
        action.attempt.worker.send(frames.Cancel(action.attempt.number))
        self.nested.close_of(action.attempt)

    def _adopt(self, action: actions.Adopt) -> None:
        attempt, delivery = action.attempt, cast("Delivery", action.attempt.delivery)
        self.credits.ledgers[attempt.message.queue].hold(delivery)
        delivery.delivered += 1  # the worker delivered it to this runner
        attempt.worker.adopt(attempt)
        self.attempts.add(attempt)

    def _release(self, action: actions.Release) -> None:
        self.attempts.discard(action.attempt)
        seat = action.attempt.worker.seat
        if seat is not None:
            seat.done(action.attempt)

    def _refuse(self, action: actions.Refuse) -> None:
        self.settler.refuse(action.delivery, action.message, action.outcome, self.revision.spec.retention_s)
        self.tracing.refuse(action.message, action.outcome)

    def _hand_back(self, action: actions.HandBack) -> None:
        self.start_log.hand_back(action.attempt, action.reason, action.message)
        self.tracing.interrupt(action.attempt, action.reason, action.message)

    def _collect_result(self, action: actions.CollectResult) -> None:
        """Take a large result: into the folder of a caller on this host, or into the runner's."""
        attempt, result = action.attempt, action.result
        outcome, worker, shared_body, runner_file = Outcome(OutcomeKind.SUCCEEDED), attempt.worker.id, "", ""
        try:
            if not attempt.is_submitted and self.shared_bodies.reach(attempt.message):
                shared_body = self.shared_bodies.collect(attempt.message, worker, result.shared_body)
            else:
                runner_file = self.shared_bodies.keep(worker, result.shared_body)
        except ResultNotEncodable as error:
            outcome = Outcome(OutcomeKind.RAISED, error.info())
        self.dispatch(events.ResultCollected(attempt, result, outcome, shared_body, runner_file))

    def _settle(self, action: actions.Settle) -> None:
        try:
            self.settler.settle(action)
        finally:
            is_failed = action.outcome.kind is not _SUCCEEDED
            self.meter.count(action.attempt.message, is_failed=is_failed, run_s=action.charged_s, gpu_s=action.gpu_s)
            self.meter.energy.end(action.attempt, self.clock.monotonic())
            if action.attempt.message.trace:
                self.tracing.end(action)

    def _slot_changed(self, action: actions.SlotChanged) -> None:
        try:
            self.workers.slot_freed(action.worker)
        finally:
            self.credits.offer()

    def _log_failure(self, link: WorkerLink, error: ErrorInfo | None, call: InvocationMessage | None = None) -> None:
        """Write a failure to the function's log, as the caller receives it."""
        if error is not None:
            text = error.traceback or f"{error.code}: {error.message}"
            self.output.publish(link, call, "error", text.encode())

    def _await_exit(self, action: actions.AwaitExit) -> None:
        worker = action.worker_id
        self.agent_events.on_exit(worker, lambda exit_: self.dispatch(events.WorkerExited(worker, exit_)))

    def _report_limit(self) -> None:
        self.on_limit(self.revision, self._capacity.fast_path_limit())

    def _handlers(self) -> Mapping[type[actions.Action], Callable[[Any], None]]:
        return {
            actions.GetArguments: self._get_arguments,
            actions.RequestTurn: self._request_turn,
            actions.RevokeTurns: self._revoke_turns,
            actions.CheckRecord: lambda action: self._look_up(action.attempt, self._look_up_record),
            actions.CheckCaller: lambda action: self._look_up(action.attempt, self._look_up_caller),
            actions.SendRun: self._send_run,
            actions.SendStop: self._send_stop,
            actions.Adopt: self._adopt,
            actions.StopUnfinished: lambda action: action.worker.send(frames.Cancel(action.number)),
            actions.AnnounceStart: lambda action: self.on_start(action.attempt),
            actions.NoteStart: lambda action: self.start_log.note(action.attempt),
            actions.Release: self._release,
            actions.DropBody: lambda action: self.shared_bodies.drop(action.worker.id, action.shared_body),
            actions.Touch: lambda action: action.delivery.touch(),
            actions.Nak: lambda action: action.delivery.nak(action.delay_s),
            actions.Term: lambda action: action.delivery.term(),
            actions.CountReturned: lambda action: self.credits.handed_back(action.message),
            actions.Refuse: self._refuse,
            actions.Confirm: lambda action: self.settler.confirm(action.delivery, action.record),
            actions.AckSuperseded: lambda action: self.settler.drop(action.delivery),
            actions.CollectResult: self._collect_result,
            actions.HandBack: self._hand_back,
            actions.Settle: self._settle,
            actions.LogFailure: lambda action: self._log_failure(action.worker, action.error, action.message),
            actions.AwaitExit: self._await_exit,
            actions.StopAwaiting: lambda action: self.agent_events.forget(action.worker_id),
            actions.SlotChanged: self._slot_changed,
            actions.WorkerSpent: lambda action: self.workers.on_spent(action.worker),
            actions.OfferCredits: lambda _: self.credits.offer(),
            actions.ShrinkCredits: lambda _: self.credits.shrink(),
            actions.ReportLimit: lambda _: self._report_limit(),
        }
