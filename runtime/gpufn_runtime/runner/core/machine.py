"""The state machine of one Revision's calls on a node: `handle(event, now) -> actions`. Pure.

1. Arrived: the call gets a slot of the least busy worker, waits in the backlog, or returns to its queue.
2. Before it begins: its arguments are fetched, its worker gets a turn on a shared GPU, and a call that was handed over
   before is looked up.
3. ResultReceived, the runner's decision (a timeout, a cancel), or the loss of the worker ends it. `end_rules` decides
   whether it runs again, `ends` charges it, and `lost_workers` waits for the exit of its process.
4. Ticked: ack deadlines are extended, and attempts that are overdue end.

The lookups, the sockets and the bus are the edge's: an action requests something, and an event answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final, Generic

from gpufn_core.domain.invocation import STOPS_WITHIN_S, Outcome, OutcomeKind, queue_timeout_error
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import InvalidInput, WorkerLost
from gpufn_core.protocol import frames
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import StartNote
from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW
from gpufn_core.spec.function_spec import CallKind
from gpufn_runtime.runner.core import actions, events, start_numbers
from gpufn_runtime.runner.core.attempt import Attempt, AttemptState, Decided, Execution, Stop, may_run_s
from gpufn_runtime.runner.core.backlog import LONG_RUNNING_S
from gpufn_runtime.runner.core.capacity import Capacity, W
from gpufn_runtime.runner.core.end_rules import (
    CANCELLED,
    Ending,
    outcome_of_stop,
)
from gpufn_runtime.runner.core.ends import Ends, within
from gpufn_runtime.runner.core.events import Now
from gpufn_runtime.runner.core.lost_workers import LostWorkers
from gpufn_runtime.runner.core.step import TOUCH_EVERY_S, Step
from gpufn_runtime.runner.core.views import DeliveryView, WorkerView

ACK_WAIT_S: Final = 8.0  # NATS redelivers a call whose ack deadline was not extended for this long
NOTED_AFTER_S: Final = 0.25  # a start is noted when it lasts: most calls end sooner and need no write to the bus
_MAX_DELIVERIES = 100  # each one is a hand-back, or a runner that died with the call
_CALLER_RECONNECT_S = 1.0  # a caller that lost the bus has reconnected by then
_FETCH_RETRY_S = 1.0  # until the bus is back or memory is free
# Each call needs these, and Python looks up a member of an enum slowly.
_SUCCEEDED, _CANCELLED, _HAND_BACK = OutcomeKind.SUCCEEDED, OutcomeKind.CANCELLED, Ending.HAND_BACK
_RUNNING, _ENDED = AttemptState.RUNNING, AttemptState.ENDED
_HAS_WORKER = (WorkerState.READY, WorkerState.PARKING, WorkerState.DRAINING)  # a worker that gave a slot still holds it

# How long a worker may take to stop a call. A sync function cannot be interrupted, so its worker is killed at once
# after a timeout. A cancelled call may end soon, which would keep the worker warm.
_STOP_TIMEOUT_S = {OutcomeKind.TIMED_OUT: STOPS_WITHIN_S, OutcomeKind.CANCELLED: 5.0}


class RevisionMachine(Generic[W]):
    def __init__(self, revision: Revision) -> None:
        self.revision = revision
        self.capacity: Capacity[W] = Capacity(revision.spec)
        self._spec = revision.spec
        self._methods = {method.name: method for method in revision.spec.methods}
        self._unbegun: dict[Attempt, None] = {}  # attempts that have a slot and have not begun, in order
        self._step = Step()
        self._now, self._emit = self._step.now, self._step.emit  # here too: each call needs them often
        self._ends = Ends(revision.spec, self._step)
        self._lost_workers = LostWorkers(revision.spec, self._step, self._ends)
        self.totals = self._ends.totals

    def handle(self, event: events.Event, now: Now) -> list[actions.Action]:
        """Return the actions that follow from the event, in order."""
        result: list[actions.Action] = []
        self._now = self._step.now = now
        self._emit = self._step.emit = result.append
        self._HANDLERS[type(event)](self, event)
        return result

    @property
    def is_busy(self) -> bool:
        """Whether attempts depend on the time: Ticked has to come."""
        return bool(self._unbegun or self._lost_workers.losses) or any(
            worker.attempts for worker in self.capacity.workers.values()
        )

    @property
    def awaits_exits(self) -> bool:
        """Whether attempts wait for the death of their process."""
        return bool(self._lost_workers.losses)

    def attempts(self) -> Iterator[Attempt]:
        """Attempts that have begun: in workers, and of lost workers."""
        yield from self.capacity.attempts()
        yield from self._lost_workers.attempts()

    # --- arrival ------------------------------------------------------------------------------------------------------

    def _on_arrived(self, event: events.Arrived) -> None:
        delivery, message, now = event.delivery, event.message, self._now.unix
        if message.not_before > now:
            self._emit(actions.Nak(delivery, min(message.not_before - now, self._max_delay_s(message))))
            self._emit(actions.OfferCredits())
        elif now >= message.expires_at(self._spec.queue_timeout_s, delivery.delivered):
            expired = queue_timeout_error(now - message.submitted_at).info()
            self._refuse(delivery, message, Outcome(OutcomeKind.EXPIRED, expired))
        elif (worker := self.capacity.least_busy()) is None:
            self._add_to_backlog(event)
        elif delivery.delivered > _MAX_DELIVERIES:
            lost = WorkerLost(f"delivered {delivery.delivered} times without an end").info()
            self._refuse(delivery, message, Outcome(OutcomeKind.LOST, lost))
        elif (method := self._methods.get(message.method)) is None:
            unknown = InvalidInput(f"{self.revision} has no method {message.method!r}").info()
            self._refuse(delivery, message, Outcome(OutcomeKind.REJECTED, unknown))
        else:
            attempt = Attempt(
                worker.next_attempt_number(),
                delivery,
                message,
                method,
                worker,
                touched_at=self._now.monotonic,
                body=event.body,
                caller_was_away=event.caller_was_away,
            )
            if message.attempt > 1:
                attempt.reason = start_numbers.first_reason(message)
            worker.slots.take()
            worker.idle_since = None
            self._unbegun[attempt] = None
            if message.shared_body or message.reference is not None:
                self._emit(actions.GetArguments(attempt))
            else:
                self._proceed(attempt)
            if worker.slots.is_spent:
                self._emit(actions.WorkerSpent(worker))

    def _add_to_backlog(self, call: events.Arrived) -> None:
        """Let the call wait, or return it. A call from the queue may exceed the room: it had a credit."""
        backlog = self.capacity.backlog
        if not (backlog.is_short and self.capacity.slots) or (call.delivery.is_direct and self.capacity.room() <= 0):
            self._return_waiting(call)
        else:
            backlog.append(call)

    def _return_waiting(self, call: events.Arrived) -> None:
        self._emit(actions.Nak(call.delivery))
        if not call.delivery.is_direct:
            self._emit(actions.CountReturned(call.message))

    def _return_backlog(self) -> None:
        while self.capacity.backlog:
            self._return_waiting(self.capacity.backlog.popleft())

    def _serve_backlog(self) -> None:
        """Start waiting calls in free slots. Return the rest if there are no slots, or calls are not short."""
        if not (backlog := self.capacity.backlog):
            return
        while backlog and self.capacity.free:
            call = backlog.popleft()
            if call.delivery.is_withdrawn:
                self._emit(actions.Term(call.delivery))
            else:
                self._on_arrived(call)
        if backlog and not (self.capacity.slots and backlog.is_short):
            self._return_backlog()

    def _max_delay_s(self, message: InvocationMessage) -> float:
        """Return the longest possible delay of a retry. It limits `not_before` if the clock was set back."""
        retries = self._spec.retries
        return 0.0 if retries is None else retries.delay_before(message.retries_used + 1)

    # --- before it begins ---------------------------------------------------------------------------------------------

    def _on_arguments_ready(self, event: events.ArgumentsReady) -> None:
        attempt = event.attempt
        attempt.shared_body = event.shared_body
        if not self._has_worker(attempt):
            self._return(attempt)
        elif attempt.is_unwanted:
            self._end_unbegun(attempt, CANCELLED)
        else:
            self._proceed(attempt)

    def _on_arguments_failed(self, event: events.ArgumentsFailed) -> None:
        if event.is_lost:
            self._end_unbegun(event.attempt, Outcome(OutcomeKind.LOST, event.error))
        else:
            self._return(event.attempt, _FETCH_RETRY_S)

    def _proceed(self, attempt: Attempt) -> None:
        """Request a turn on the GPU if its worker shares it by time."""
        if not attempt.worker.shares_by_time:
            self._check_or_run(attempt)
            return
        expires_at = attempt.message.expires_at(self._spec.queue_timeout_s, attempt.delivery.delivered)
        attempt.expires_at = self._now.monotonic + expires_at - self._now.unix
        attempt.move(AttemptState.WAITING)
        self._emit(actions.RequestTurn(attempt))

    def _on_turn_granted(self, event: events.TurnGranted) -> None:
        if event.attempt.state is AttemptState.WAITING:  # it may have ended since the turn was granted
            self._check_or_run(event.attempt)

    def _return_waiting_for_turn(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            if attempt.state is AttemptState.WAITING:
                self._free_unbegun(attempt)  # nothing new begins in the slot: the worker is about to end
                self._emit(actions.Nak(attempt.delivery))

    def _check_or_run(self, attempt: Attempt) -> None:
        """Look up a call that may have been started before, or whose caller may have left."""
        is_repeated = attempt.delivery.delivered > 1
        if attempt.is_submitted and (is_repeated or attempt.message.attempt > 1):
            attempt.move(AttemptState.CHECKING)
            self._emit(actions.CheckRecord(attempt))
        elif is_repeated or (attempt.caller_was_away and not attempt.is_direct):
            attempt.move(AttemptState.CHECKING)
            self._emit(actions.CheckCaller(attempt))
        else:
            if attempt.message.may_have_begun:
                self._number(attempt, None)
            self._run(attempt)

    def _on_record_checked(self, event: events.RecordChecked) -> None:
        """Run a submitted call unless its record shows that it has ended.

        An earlier delivery may have ended the call, or queued its next attempt, without an ack. A cancel may have ended
        the call between two attempts, or during the lookup. Or another runner has it: after a stall NATS redelivers a
        running call before it reads our in-progress acks.
        """
        attempt, record = event.attempt, event.record
        if not self._has_worker(attempt):
            self._return(attempt)
        elif record is not None and record.state.ended:
            self._give_up(attempt, actions.Confirm(attempt.delivery, record))
        elif record is not None and record.attempt > attempt.message.attempt:
            self._give_up(attempt, actions.AckSuperseded(attempt.delivery))
        elif attempt.is_unwanted:
            self._end_unbegun(attempt, CANCELLED)
        elif event.is_elsewhere:
            self._return(attempt, ACK_WAIT_S)
        else:
            if attempt.is_repeated:
                self._number(attempt, event.note)
            self._run(attempt)
            if attempt.is_repeated:
                self._note(attempt)

    def _on_caller_checked(self, event: events.CallerChecked) -> None:
        """Run a call whose caller still waits.

        The caller may have died with an earlier runner, or while the call was queued.
        """
        attempt = event.attempt
        if not self._has_worker(attempt):
            self._return(attempt)
        elif event.is_elsewhere:
            self._return(attempt, ACK_WAIT_S)
        elif event.is_waited_for is None:
            self._return(attempt, _CALLER_RECONNECT_S)
        elif attempt.is_unwanted or not event.is_waited_for:
            self._end_unbegun(attempt, CANCELLED)
        else:
            self._number(attempt, None)
            self._run(attempt)

    def _has_worker(self, attempt: Attempt) -> bool:
        return attempt.worker.state in _HAS_WORKER

    def _number(self, attempt: Attempt, note: StartNote | None) -> None:
        """Number an attempt whose call may have been started before."""
        unknown = attempt.delivery.starts_since(note.delivered if note is not None else 0)
        attempt.message, attempt.reason = start_numbers.next_start(attempt.message, note, unknown, self._now.unix)

    def _free_unbegun(self, attempt: Attempt) -> None:
        """Free the slot of an attempt that does not begin."""
        attempt.move(_ENDED)
        del self._unbegun[attempt]
        if attempt.shared_body:
            self._emit(actions.DropBody(attempt.worker, attempt.shared_body))
        attempt.worker.slots.release()
        self._emit(actions.Release(attempt))

    def _return(self, attempt: Attempt, delay_s: float = 0.0) -> None:
        self._give_up(attempt, actions.Nak(attempt.delivery, delay_s))

    def _end_unbegun(self, attempt: Attempt, outcome: Outcome) -> None:
        refuse = actions.Refuse(attempt.delivery, attempt.message, outcome)
        self._give_up(attempt, refuse, actions.OfferCredits())

    def _give_up(self, attempt: Attempt, *settlement: actions.Action) -> None:
        """Settle the delivery of an attempt that does not begin."""
        self._free_unbegun(attempt)
        for action in settlement:
            self._emit(action)
        if attempt.worker.state.live:
            self._after_end(attempt.worker)

    def _refuse(self, delivery: DeliveryView, message: InvocationMessage, outcome: Outcome) -> None:
        self._emit(actions.Refuse(delivery, message, outcome))
        self._emit(actions.OfferCredits())

    # --- a run --------------------------------------------------------------------------------------------------------

    def _run(self, attempt: Attempt) -> None:
        message, worker, now = attempt.message, attempt.worker, self._now
        timeout_s = may_run_s(message, self._spec.timeout_s, now.unix)
        granted = STREAM_WINDOW if message.stream and attempt.method.kind.streams else 0
        attempt.begun = Execution(
            started_at=now.unix,
            began=now.monotonic,
            must_end_at=now.monotonic + timeout_s,
            is_cold=worker.cold_start is not None and self.capacity.is_cold(message.submitted_at),
            busy_from=worker.busy.begin(now.monotonic),
            granted=granted,
        )
        attempt.move(_RUNNING)
        del self._unbegun[attempt]
        worker.attempts[attempt.number] = attempt
        takes_shared_body = not message.stream
        run = frames.Run(
            attempt.number, message.id, message.method, message.content_type, message.accept, message.attempt,
            granted > 0, granted, attempt.shared_body, takes_shared_body, now.unix + timeout_s, message.trace,
            attempt.delivery.settled_at, message.is_live and attempt.method.kind.streams,
        )  # fmt: skip
        body, attempt.body = attempt.body, b""
        self._emit(actions.SendRun(attempt, run, b"" if attempt.shared_body else body))
        self._record_start(attempt)

    def _record_start(self, attempt: Attempt) -> None:
        """Count a start, here or under the previous runner, and announce it to the followers of the call."""
        self.totals.started += 1
        if attempt.is_submitted or (self._spec.queue_timeout_s is not None and not attempt.is_direct):
            self._emit(actions.AnnounceStart(attempt))

    def _note(self, attempt: Attempt) -> None:
        if not attempt.run.is_noted:
            attempt.run.is_noted = True
            self._emit(actions.NoteStart(attempt))

    def _on_unfinished_found(self, event: events.UnfinishedFound) -> None:
        """Adopt an attempt of an earlier runner. Its deadline stays; its GPU time is counted from now on."""
        worker, unfinished, delivery, message = event.worker, event.unfinished, event.delivery, event.message
        if not worker.state.live:
            return
        if delivery is None or message is None or message.method not in self._methods:
            self._emit(actions.StopUnfinished(worker, unfinished.attempt))
            return
        message, reason = start_numbers.adopted(message, event.note, unfinished.number, event.counted)
        now = self._now
        ran_s = min(max(0.0, unfinished.ran_s), max(0.0, now.unix - message.submitted_at))
        began, started_at = now.monotonic - ran_s, now.unix - ran_s
        attempt = Attempt(
            unfinished.attempt,
            delivery,
            message,
            self._methods[message.method],
            worker,
            touched_at=now.monotonic - TOUCH_EVERY_S,  # at once: it may be due
            reason=reason,
            state=AttemptState.RUNNING,
            begun=Execution(
                started_at=started_at,
                began=began,
                must_end_at=began + may_run_s(message, self._spec.timeout_s, started_at),
                is_cold=False,
                busy_from=worker.busy.begin(now.monotonic),
            ),
        )
        worker.attempts[attempt.number] = attempt
        self._emit(actions.Adopt(attempt))
        self._record_start(attempt)

    def _cancel(self, attempt: Attempt) -> None:
        match attempt.state:
            case AttemptState.PREPARING | AttemptState.CHECKING:
                attempt.is_unwanted = True
            case AttemptState.WAITING:
                self._end_unbegun(attempt, CANCELLED)
            case AttemptState.RUNNING | AttemptState.STOPPING | AttemptState.LOST:
                self._stop(attempt, OutcomeKind.CANCELLED, self._now.monotonic)
            case AttemptState.ENDED:
                pass

    def _on_withdrawn(self, event: events.Withdrawn) -> None:
        for attempt in [
            each for each in (*self._unbegun, *self.capacity.attempts()) if each.delivery is event.delivery
        ]:
            self._cancel(attempt)

    def _stop(self, attempt: Attempt, kind: Decided, now: float) -> None:
        """Have the worker stop the attempt, with a deadline. `now` is monotonic."""
        if attempt.run.ending is not None:
            return
        is_uninterruptible = attempt.method.kind is CallKind.SYNC and kind is OutcomeKind.TIMED_OUT
        attempt.run.ending = Stop(kind, now if is_uninterruptible else now + _STOP_TIMEOUT_S[kind])
        if attempt.state is AttemptState.RUNNING:
            attempt.move(AttemptState.STOPPING)
            self._emit(actions.SendStop(attempt))

    # --- its end ------------------------------------------------------------------------------------------------------

    def _on_result_received(self, event: events.ResultReceived) -> None:
        attempt, result, run = event.attempt, event.result, event.attempt.run
        attempt.worker.slots.release()
        self._ends.leave_worker(attempt)
        run.elapsed_s = self._now.monotonic - run.began
        run.run_s = within(result.run_s, run.elapsed_s, run.elapsed_s)
        run.busy_s = min(run.busy_s, run.run_s)
        outcome = Outcome(result.kind, result.error)
        if run.ending is not None:
            outcome = outcome_of_stop(run, run.ending, self._spec.timeout_s)
        if result.shared_body and outcome.kind is _SUCCEEDED:
            self._emit(actions.CollectResult(attempt, result))
        else:
            if result.shared_body:
                self._emit(actions.DropBody(attempt.worker, result.shared_body))
            self._ends.end_with_result(attempt, result, outcome, body=event.body)
        self.capacity.ended(run.run_s, len(event.body))
        self._after_end(attempt.worker)

    def _on_result_collected(self, event: events.ResultCollected) -> None:
        self._ends.end_with_result(
            event.attempt, event.result, event.outcome, shared_body=event.shared_body, runner_file=event.runner_file
        )

    def _after_end(self, worker: WorkerView) -> None:
        """A slot is free again, or poisoned."""
        self._emit(actions.SlotChanged(worker))
        self._serve_backlog()

    def _on_slot_freed(self, event: events.SlotFreed) -> None:
        if event.shared_body:
            self._emit(actions.DropBody(event.worker, event.shared_body))
        self._after_end(event.worker)

    # --- workers ------------------------------------------------------------------------------------------------------

    def _on_capacity_increased(self, _: events.CapacityIncreased) -> None:
        self._emit(actions.ReportLimit())
        self._emit(actions.OfferCredits())

    def _on_capacity_decreased(self, _: events.CapacityDecreased) -> None:
        self._emit(actions.ShrinkCredits())
        self._emit(actions.ReportLimit())
        self._serve_backlog()

    def _on_closed(self, _: events.Closed) -> None:
        self._lost_workers.forget()
        self._return_backlog()
        self._emit(actions.ReportLimit())

    # --- the time -----------------------------------------------------------------------------------------------------

    def _on_ticked(self, event: events.Ticked) -> None:
        cutoff, now = event.cutoff, self._now.monotonic
        has_long_running = False
        for worker in list(self.capacity.workers.values()):
            for attempt in list(worker.attempts.values()):
                has_long_running |= now - attempt.run.began > LONG_RUNNING_S
                self._tick_running(attempt, cutoff)
        for attempt in list(self._unbegun):
            if attempt.state is AttemptState.WAITING and cutoff >= attempt.expires_at:
                expired = queue_timeout_error(self._now.unix - attempt.message.submitted_at).info()
                self._end_unbegun(attempt, Outcome(OutcomeKind.EXPIRED, expired))
            elif attempt.state is not AttemptState.ENDED:
                self._step.touch(attempt)
        self._lost_workers.tick(cutoff)
        self._set_long_running(has_long_running)

    def _tick_running(self, attempt: Attempt, cutoff: float) -> None:
        run = attempt.run
        if cutoff >= run.must_end_at:
            self._stop(attempt, OutcomeKind.TIMED_OUT, cutoff)
        if run.ending is not None and cutoff >= run.ending.until:
            self._emit(actions.RevokeTurns(attempt.worker))
            # Return them now: SlotChanged ends the worker only if no slot is in use.
            self._return_waiting_for_turn([each for each in self._unbegun if each.worker is attempt.worker])
            self._ends.end_without_result(attempt, None)
            self._emit(actions.ShrinkCredits())
            self._after_end(attempt.worker)
            return
        self._step.touch(attempt)
        if attempt.is_submitted and self._now.monotonic - run.began >= NOTED_AFTER_S:
            self._note(attempt)

    def _set_long_running(self, is_long_running: bool) -> None:
        """Close the backlog while a call runs for long, and return the calls that wait in it."""
        backlog = self.capacity.backlog
        if is_long_running is not backlog.is_closed:
            backlog.is_closed = is_long_running
            self._emit(actions.ReportLimit())
        if is_long_running:
            self._return_backlog()
            self._emit(actions.ShrinkCredits())

    _HANDLERS: ClassVar[dict[type[events.Event], Callable[[Any, Any], None]]] = {
        events.Arrived: _on_arrived,
        events.ArgumentsReady: _on_arguments_ready,
        events.ArgumentsFailed: _on_arguments_failed,
        events.TurnGranted: _on_turn_granted,
        events.TurnsRevoked: lambda self, event: self._return_waiting_for_turn(event.attempts),
        events.RecordChecked: _on_record_checked,
        events.CallerChecked: _on_caller_checked,
        events.ResultReceived: _on_result_received,
        events.ResultCollected: _on_result_collected,
        events.SlotFreed: _on_slot_freed,
        events.UnfinishedFound: _on_unfinished_found,
        events.Cancelled: lambda self, event: self._cancel(event.attempt),
        events.Withdrawn: _on_withdrawn,
        events.WorkerReady: lambda self, event: self.capacity.became_ready(event.worker, event.since),
        events.CapacityIncreased: _on_capacity_increased,
        events.CapacityDecreased: _on_capacity_decreased,
        events.WorkerLost: lambda self, event: self._lost_workers.on_lost(event),
        events.WorkerExited: lambda self, event: self._lost_workers.on_exit(event.worker_id, event.exit),
        events.Ticked: _on_ticked,
        events.Closed: _on_closed,
    }
