"""Invariants of the state machine for any events: late, repeated, reordered or missing ones.

`Node` plays the edge and all that is beyond it: queues, gateways, workers, the agent. It keeps the edge's guarantees:
an event that an action causes is handled after the actions of the event before it, each lookup is answered once, and a
worker sends one result for each attempt, over one connection.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpufn_core.domain.invocation import InvocationState, Outcome, OutcomeKind
from gpufn_core.domain.retry_policy import Settlement
from gpufn_core.domain.worker import ColdStart, Exit, WorkerState
from gpufn_core.errors import DeviceFailed, ErrorInfo, ResultNotEncodable
from gpufn_core.protocol import frames
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import BodyReference, CallRecord
from gpufn_core.spec.function_spec import CallKind, Retry
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import TRANSITIONS, Attempt, AttemptState, Stop
from gpufn_runtime.runner.core.machine import RevisionMachine
from gpufn_runtime.runner.core.step import TOUCH_EVERY_S
from tests.runtime.runner.core.bench import NOW, RAISED, START, FakeDelivery, FakeWorker, message_of, revision_of

T = TypeVar("T")
S = AttemptState
UNBEGUN = (S.PREPARING, S.WAITING, S.CHECKING)
IN_WORKER = (S.RUNNING, S.STOPPING)
REFERENCE = BodyReference("i", "digest", 1 << 20)
EXITS = (Exit(signal=9), Exit(code=3), Exit(signal=9, device_fault="Xid 79"), Exit(signal=9, stopping=True))
SETTLED_BY = (actions.Nak, actions.Term, actions.Refuse, actions.Confirm, actions.AckSuperseded)
INDEX = st.integers(0, 11)
ARGUMENTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {}, {}, {"shared_body": "a"}, {"reference": REFERENCE}]
)
BEGAN = st.sampled_from(["", "", "", "before", "retry"])


def _closure(state: AttemptState) -> frozenset[AttemptState]:
    """The states that an attempt may reach, in any number of transitions."""
    return frozenset({state}).union(*map(_closure, TRANSITIONS[state]))


REACHABLE = {state: _closure(state) for state in AttemptState}


@dataclass(eq=False)
class Call:
    """A call, and its message in the queue. `delivered` counts the hand-overs of that message."""

    message: InvocationMessage
    delivered: int = 0
    is_ended: bool = False
    is_in_queue: bool = True


@dataclass(eq=False)
class Delivery(FakeDelivery):
    """A hand-over, which is settled once."""

    call: Call = field(kw_only=True)
    settled: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Worker(FakeWorker):
    """A worker and its process. `unadopted` are attempts of an earlier runner, each in a slot."""

    turns: list[Attempt] = field(default_factory=list)  # attempts that wait for a turn
    unadopted: set[int] = field(default_factory=set)
    unanswered: int = 0  # attempts of an earlier runner whose adoption is not decided yet
    is_drained: bool = False
    explained_within_s: float = math.inf


def pick(items: list[T], index: int) -> T:
    return items[index % len(items)]


class Node(RuleBasedStateMachine):
    """A runner's node, with one Revision."""

    def __init__(self) -> None:
        super().__init__()
        self.monotonic, self.unix, self.ticked_at = START, NOW, START
        self.workers: dict[str, Worker] = {}  # all that ever were
        self.calls: list[Call] = []
        self.deliveries: list[Delivery] = []
        self.attempts: dict[Attempt, AttemptState] = {}  # all that ever were, with the state after the last event
        self.answered: set[Attempt] = set()  # attempts whose result came
        self.stops: dict[Attempt, Stop] = {}
        self.noted: set[Attempt] = set()
        self.lookups: list[actions.GetArguments | actions.CheckRecord | actions.CheckCaller] = []
        self.unfinished: list[tuple[Worker, frames.Unfinished, Call]] = []  # adoptions that are not decided
        self.awaited: set[str] = set()  # workers whose exit is awaited
        self.exits: dict[str, Exit] = {}  # as the agent reported them
        self.events: deque[events.Event] = deque()
        self.is_dispatching = self.is_closed = False
        self.ids = itertools.count(1)

    @initialize(
        kind=st.sampled_from([CallKind.SYNC, CallKind.ASYNC]),
        concurrency=st.integers(1, 3),
        retries=st.sampled_from([None, Retry(2, delay_s=1.0)]),
        queue_timeout_s=st.sampled_from([None, 5.0]),
        shares=st.sampled_from(["", "GPU-1"]),
        is_short=st.booleans(),
        closes_early=st.booleans(),
        timeout_s=st.sampled_from([3.0, 30.0]),
        calls=st.integers(0, 3),
    )
    def deploy(
        self, kind: CallKind, shares: str, is_short: bool, closes_early: bool, calls: int, **options: Any
    ) -> None:
        self.revision = revision_of(kind, **options)
        self.machine: RevisionMachine[Worker] = RevisionMachine(self.revision)
        self.capacity = self.machine.capacity
        self.gpu, self.closes_early = shares, closes_early
        for _ in range(50 * is_short):
            self.capacity.ended(0.001, 10)
        self.make_ready(self.assign(must_take_turns=True))
        self.submit({}, "", calls)

    # --- the edge -----------------------------------------------------------------------------------------------------

    def dispatch(self, event: events.Event) -> None:
        self.events.append(event)
        if self.is_dispatching:
            return
        self.is_dispatching = True
        while self.events:
            self.handle(self.events.popleft())
        self.is_dispatching = False

    def handle(self, event: events.Event) -> None:
        workers = list(self.workers.values())
        free = [worker.free for worker in workers]
        in_use = [worker.slots.in_use for worker in workers]
        result = self.machine.handle(event, events.Now(self.monotonic, self.unix))
        for action in result:
            if isinstance(attempt := getattr(action, "attempt", None), Attempt):
                self.attempts.setdefault(attempt, S.PREPARING if attempt.begun is None else S.RUNNING)
        for attempt, state in self.attempts.items():
            assert attempt.state in REACHABLE[state]
            self.attempts[attempt] = attempt.state
            if attempt.begun is not None and attempt.begun.ending is not None:
                assert self.stops.setdefault(attempt, attempt.begun.ending) is attempt.begun.ending
        changed = [action.worker for action in result if isinstance(action, actions.SlotChanged)]
        is_revoked = isinstance(event, events.TurnsRevoked)  # the worker is about to end
        for worker, free_before, in_use_before in zip(workers, free, in_use, strict=True):
            if worker.free > free_before and not is_revoked:
                offers = (actions.OfferCredits, actions.SlotChanged)
                assert any(isinstance(action, offers) for action in result), "a credit leaks"
            if worker.slots.in_use < in_use_before and worker.state.live and not is_revoked:
                assert worker in changed
        for action in result:
            self.execute(action)

    def execute(self, action: actions.Action) -> None:  # noqa: PLR0912  one branch for each action
        match action:
            case actions.GetArguments(attempt):
                if attempt.message.shared_body:
                    self.dispatch(events.ArgumentsReady(attempt, "args"))
                else:
                    self.lookups.append(action)
            case actions.CheckRecord() | actions.CheckCaller():
                self.lookups.append(action)
            case actions.RequestTurn(attempt):
                if attempt.worker.must_take_turns:
                    self.of(attempt).turns.append(attempt)
                else:
                    self.dispatch(events.TurnGranted(attempt))
            case actions.RevokeTurns(link):
                self.workers[link.id].turns = []
            case actions.SendRun(attempt):
                self.on_run(attempt)
            case actions.Adopt(attempt):
                self.of(attempt).unadopted.remove(attempt.number)
                self.call_of(attempt).is_in_queue = False
            case actions.Release(attempt):
                assert attempt.state is S.ENDED
                if attempt in self.of(attempt).turns:
                    self.of(attempt).turns.remove(attempt)
            case actions.SlotChanged(link):
                self.on_slot_changed(self.workers[link.id])
            case actions.NoteStart(attempt):
                assert attempt not in self.noted
                assert attempt.is_submitted
                self.noted.add(attempt)
            case actions.Touch(delivery):
                assert isinstance(delivery, Delivery)
                assert not delivery.settled, "NATS would ignore it"
            case actions.AwaitExit(worker):
                self.awaited.add(worker)
                if worker in self.exits:
                    self.report(worker)
            case actions.StopAwaiting(worker):
                self.awaited.discard(worker)
            case actions.CollectResult(attempt, result):
                can_collect = result.shared_body != "gone"
                kind = OutcomeKind.SUCCEEDED if can_collect else OutcomeKind.RAISED
                error = None if can_collect else ResultNotEncodable("gone").info()
                self.dispatch(events.ResultCollected(attempt, result, Outcome(kind, error), "", "kept"))
            case actions.HandBack(attempt):
                self.check_is_dead(attempt)
                self.settle(attempt.delivery, action)
                self.queue(attempt.delivery, may_have_begun=attempt.is_direct)
            case actions.Settle(attempt):
                self.on_settle(attempt, action)
            case actions.Nak(delivery):
                self.settle(delivery, action)
                self.queue(delivery)
            case actions.Term() | actions.Refuse() | actions.Confirm() | actions.AckSuperseded():
                self.settle(action.delivery, action)
                self.end(action.delivery)

    def of(self, attempt: Attempt) -> Worker:
        return self.workers[attempt.worker.id]

    def call_of(self, attempt: Attempt) -> Call:
        assert isinstance(attempt.delivery, Delivery)
        return attempt.delivery.call

    def settle(self, delivery: Any, action: actions.Action) -> None:
        delivery.settled.append(type(action).__name__)
        assert len(delivery.settled) == 1, delivery.settled

    def queue(self, delivery: Any, *, may_have_begun: bool = False) -> None:
        """The message is in its queue again. A gateway queues a fast-path call unless its caller is gone."""
        call: Call = delivery.call
        call.is_ended, call.is_in_queue = delivery.is_withdrawn, not delivery.is_withdrawn
        if delivery.is_direct:
            call.message = msgspec.structs.replace(call.message, may_have_begun=may_have_begun)
            call.delivered = 0

    def end(self, delivery: Any) -> None:
        assert not delivery.call.is_ended
        delivery.call.is_ended = True

    def on_run(self, attempt: Attempt) -> None:
        assert not self.is_closed
        assert attempt.worker.state.live
        assert not self.call_of(attempt).is_ended
        others = [each for each in self.here if each is not attempt]
        assert self.call_of(attempt) not in map(self.call_of, others), "it runs twice at once"

    def on_settle(self, attempt: Attempt, action: actions.Settle) -> None:
        assert attempt.state is S.ENDED
        self.settle(attempt.delivery, action)
        if action.settlement is Settlement.ACK:
            self.end(attempt.delivery)
            return
        self.check_is_dead(attempt)
        assert self.revision.spec.retries is not None
        call, message = self.call_of(attempt), attempt.message
        delay_s = self.revision.spec.retries.delay_before(message.retries_used + 2)
        call.message = msgspec.structs.replace(
            message, attempt=message.attempt + 1, retried=message.retries_used + 1, not_before=self.unix + delay_s
        )
        call.delivered, call.is_in_queue = 0, True
        assert call.message.retries_used <= self.revision.spec.retries.attempts

    def check_is_dead(self, attempt: Attempt) -> None:
        """The call starts again: a process that may still run it would run it twice."""
        if attempt.run.lost_at != math.inf:
            is_over = self.monotonic >= attempt.run.lost_at + self.of(attempt).explained_within_s
            assert attempt.worker.id in self.exits or is_over

    def on_slot_changed(self, worker: Worker) -> None:
        if not worker.slots.in_use:
            if worker.slots.poisoned:
                self.retire(worker)
            worker.is_drained |= worker.state is WorkerState.DRAINING
            if worker.state is WorkerState.PARKING:
                worker.state = WorkerState.PARKED

    def revoke_turns(self, worker: Worker) -> None:
        waiting, worker.turns = worker.turns, []
        self.dispatch(events.TurnsRevoked(waiting))

    def retire(self, worker: Worker) -> None:
        """Hang up, and have the agent kill it."""
        self.revoke_turns(worker)
        if worker.state.live:
            worker.state = WorkerState.FAILED
        self.dispatch(events.CapacityDecreased())

    def report(self, worker: str) -> None:
        self.awaited.discard(worker)
        self.dispatch(events.WorkerExited(worker, self.exits[worker]))

    # --- calls --------------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> list[Call]:
        return [call for call in self.calls if call.is_in_queue and not call.is_ended]

    @rule(arguments=ARGUMENTS, within_s=st.sampled_from([None, None, 1.0, 20.0]), began=BEGAN, count=st.integers(1, 3))
    def call(self, arguments: dict[str, Any], within_s: float | None, began: str, count: int) -> None:
        """Calls are handed over whose callers wait. An earlier runner may have begun them."""
        for _ in range(count):
            self.call_once(is_submitted=False, arguments=arguments, within_s=within_s, began=began)

    @rule(arguments=ARGUMENTS, began=BEGAN, count=st.integers(1, 3))
    def submit(self, arguments: dict[str, Any], began: str, count: int) -> None:
        """Submitted calls are handed over. An earlier runner may have begun them, or an earlier attempt of them."""
        for _ in range(count):
            self.call_once(is_submitted=True, arguments=arguments, within_s=None, began=began)

    def call_once(self, is_submitted: bool, arguments: dict[str, Any], within_s: float | None, began: str) -> None:
        if not any(worker.accepts_calls for worker in self.live):
            self.make_ready(self.assign(must_take_turns=bool(began)))
        id_, reply = f"i-{next(self.ids)}", "" if is_submitted else "reply.to"
        deadline = 0.0 if within_s is None or is_submitted else self.unix + within_s
        number = 2 if began == "retry" else 1
        call = Call(
            message_of(
                id_, reply=reply, submitted_at=self.unix, deadline=deadline, attempt=number, retried=number - 1,
                **arguments,
            ),
            delivered=began == "before",
        )  # fmt: skip
        self.calls.append(call)
        self.hand_over(call)

    @precondition(lambda self: self.queued)
    @rule(index=INDEX, caller_was_away=st.booleans(), count=st.integers(1, 3))
    def deliver(self, index: int, caller_was_away: bool, count: int) -> None:
        """The queue hands calls over again, perhaps before they are due, or without a slot for them."""
        for _ in range(min(count, len(self.queued))):
            self.hand_over(pick(self.queued, index), caller_was_away=caller_was_away)

    def hand_over(self, call: Call, *, caller_was_away: bool = False, is_direct: bool = False) -> None:
        call.is_in_queue = False
        call.delivered += 1
        delivery = Delivery(is_direct=is_direct, delivered=call.delivered, call=call)
        self.deliveries.append(delivery)
        self.dispatch(events.Arrived(delivery, call.message, b"{}", caller_was_away))

    @precondition(lambda self: not self.capacity.must_take_turns)
    @rule(shared_body=st.sampled_from(["", "a"]))
    def call_directly(self, shared_body: str) -> None:
        """A gateway brings a call by the fast path, perhaps without room for it."""
        call = Call(message_of(f"i-{next(self.ids)}", submitted_at=self.unix, shared_body=shared_body))
        self.calls.append(call)
        self.hand_over(call, is_direct=True)

    @property
    def direct(self) -> list[Delivery]:
        return [each for each in self.deliveries if each.is_direct and not each.settled]

    @precondition(lambda self: self.direct)
    @rule(index=INDEX)
    def withdraw(self, index: int) -> None:
        """The gateway of a fast-path call is gone."""
        delivery = pick(self.direct, index)
        delivery.is_withdrawn = True
        self.dispatch(events.Withdrawn(delivery))

    @property
    def here(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.state is not S.ENDED]

    @precondition(lambda self: self.here)
    @rule(index=INDEX)
    def cancel(self, index: int) -> None:
        """A caller cancels, in any state, perhaps again."""
        self.dispatch(events.Cancelled(pick(self.here, index)))

    @precondition(lambda self: any(state is S.ENDED for state in self.attempts.values()))
    @rule(index=INDEX)
    def repeat_late_events(self, index: int) -> None:
        """Events of an attempt that has ended, and of a worker whose exit is not awaited, change nothing."""
        attempt = pick([each for each in self.attempts if each.state is S.ENDED], index)
        late: list[events.Event] = [
            events.TurnGranted(attempt), events.TurnsRevoked([attempt]), events.Cancelled(attempt),
            *([] if attempt.worker.attempts else [events.WorkerLost(attempt.worker, 1.0)]),
            *([] if attempt.worker.id in self.awaited else [events.WorkerExited(attempt.worker.id, EXITS[0])]),
        ]  # fmt: skip
        for event in late:
            assert self.machine.handle(event, events.Now(self.monotonic, self.unix)) == []

    # --- answers ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.lookups)
    @rule(index=INDEX, choices=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def answer(self, index: int, choices: list[int]) -> None:
        """Lookups are answered in any order, perhaps after their workers are gone. From 4 on, the call may begin."""
        for choice in choices[: len(self.lookups)]:
            self.answer_lookup(self.lookups.pop(index % len(self.lookups)), choice)

    def answer_lookup(self, lookup: actions.Action, choice: int) -> None:
        match lookup:
            case actions.GetArguments(attempt):
                if choice < 2:
                    error = ErrorInfo("artifact_unavailable", "no")
                    self.dispatch(events.ArgumentsFailed(attempt, error, is_lost=choice == 0))
                else:
                    self.dispatch(events.ArgumentsReady(attempt, "args"))
            case actions.CheckRecord(attempt):
                number, state = attempt.message.attempt, InvocationState.RUNNING
                if choice == 0:
                    state = InvocationState.SUCCEEDED
                record = CallRecord(
                    id=attempt.message.id, function="f", revision=1, state=state, submitted_at=NOW,
                    attempt=number + (choice == 1),
                )  # fmt: skip
                is_elsewhere = attempt.is_repeated and choice == 2
                self.dispatch(events.RecordChecked(attempt, None if choice == 5 else record, is_elsewhere))
            case actions.CheckCaller(attempt):
                is_waited_for = None if choice == 0 else choice != 1
                self.dispatch(events.CallerChecked(attempt, is_waited_for, attempt.is_repeated and choice == 2))
            case _:
                raise AssertionError(lookup)

    @property
    def with_turns(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.turns]

    @precondition(lambda self: self.with_turns)
    @rule(index=INDEX, count=st.integers(1, 2))
    def grant_turns(self, index: int, count: int) -> None:
        worker = pick(self.with_turns, index)
        granted, worker.turns = worker.turns[:count], worker.turns[count:]
        for attempt in granted:
            self.dispatch(events.TurnGranted(attempt))

    @property
    def running(self) -> list[Attempt]:
        return [attempt for worker in self.workers.values() for attempt in worker.attempts.values()]

    @precondition(lambda self: self.running)
    @rule(index=INDEX, choice=st.integers(0, 5), run_s=st.sampled_from([0.0, 0.001, 0.5, -1.0, 1e9]))
    def result(self, index: int, choice: int, run_s: float) -> None:
        self.send_result(pick(self.running, index), choice, run_s)

    def send_result(self, attempt: Attempt, choice: int = 5, run_s: float = 0.001) -> None:
        kind, error = OutcomeKind.SUCCEEDED, None
        if choice == 0:
            kind, error = OutcomeKind.RAISED, RAISED
        elif choice == 1:
            kind, error = OutcomeKind.LOST, DeviceFailed().info()
        shared_body = {2: "r", 3: "gone"}.get(choice, "")
        del self.of(attempt).attempts[attempt.number]
        self.answered.add(attempt)
        result = frames.Result(attempt.number, kind, error, "application/json", run_s, shared_body)
        self.dispatch(events.ResultReceived(attempt, result, b"" if shared_body else b"1"))

    # --- workers ------------------------------------------------------------------------------------------------------

    def in_state(self, *states: WorkerState) -> list[Worker]:
        return [worker for worker in self.capacity.workers.values() if worker.state in states]

    @property
    def live(self) -> list[Worker]:
        return [worker for worker in self.capacity.workers.values() if worker.state.live]

    @precondition(lambda self: len(self.live) < 3)
    @rule(must_take_turns=st.booleans())
    def join(self, must_take_turns: bool) -> None:
        worker = self.assign(must_take_turns)
        self.make_ready(worker)

    def assign(self, must_take_turns: bool = False) -> Worker:
        name = f"w-{len(self.workers) + 1}"
        worker = Worker(name, self.revision, state=WorkerState.STARTING, gpu=self.gpu, cold_start=ColdStart())
        worker.must_take_turns = worker.needs_turn = bool(self.gpu) and must_take_turns
        self.workers[name] = self.capacity.workers[name] = worker
        return worker

    def make_ready(self, worker: Worker) -> None:
        worker.state = WorkerState.READY
        self.dispatch(events.WorkerReady(worker, self.unix))
        self.dispatch(events.CapacityIncreased())

    @precondition(lambda self: len(self.live) < 3)
    @rule(count=st.integers(1, 3), is_submitted=st.booleans())
    def come_back(self, count: int, is_submitted: bool) -> None:
        """A worker of an earlier runner comes back, with attempts whose results that runner did not get."""
        worker = self.assign()
        for number in range(1, 1 + min(count, worker.slots.total)):
            id_, reply = f"i-{next(self.ids)}", "" if is_submitted else "reply.to"
            call = Call(message_of(id_, reply=reply, submitted_at=self.unix - 1), delivered=1, is_in_queue=False)
            self.calls.append(call)
            worker.slots.take()
            worker.unadopted.add(number)
            worker.last_number = number
            worker.unanswered += 1
            self.unfinished.append((worker, frames.Unfinished(number, id_, "$JS.ACK", 0.5), call))

    @precondition(lambda self: self.unfinished)
    @rule(index=INDEX, choice=st.integers(0, 2))
    def decide_adoption(self, index: int, choice: int) -> None:
        """An attempt of an earlier runner is looked up. The worker becomes ready after the last one."""
        self.decide(self.unfinished.pop(index % len(self.unfinished)), is_found=choice > 0)

    def decide(self, unfinished: tuple[Worker, frames.Unfinished, Call], *, is_found: bool) -> None:
        worker, reported, call = unfinished
        worker.unanswered -= 1
        if is_found:
            delivery = Delivery(delivered=1, call=call)
            self.dispatch(events.UnfinishedFound(worker, reported, delivery, call.message, None, 1))
            if reported.attempt not in worker.unadopted:
                self.deliveries.append(delivery)
        else:
            self.dispatch(events.UnfinishedFound(worker, reported))
        if reported.attempt in worker.unadopted:
            call.is_in_queue = True  # NATS delivers it again
        if worker.state is WorkerState.STARTING and not worker.unanswered:
            self.make_ready(worker)

    @property
    def with_leftovers(self) -> list[Worker]:
        return [worker for worker in self.live if worker.unadopted and worker.state is not WorkerState.STARTING]

    @precondition(lambda self: self.with_leftovers)
    @rule(index=INDEX, shared_body=st.sampled_from(["", "r"]))
    def free_leftover(self, index: int, shared_body: str) -> None:
        """An attempt of an earlier runner that was not adopted has ended."""
        worker = pick(self.with_leftovers, index)
        worker.unadopted.pop()
        worker.slots.release()
        self.dispatch(events.SlotFreed(worker, shared_body))

    @precondition(lambda self: self.live)
    @rule(index=INDEX, choice=st.sampled_from(["park", "drain"]))
    def change(self, index: int, choice: str) -> None:
        """A worker parks, or resumes, or drains, as its assignment demands."""
        worker = pick(self.live, index)
        match worker.state:
            case WorkerState.PARKED if choice == "park":
                self.make_ready(worker)
            case WorkerState.PARKING if choice == "park":
                worker.state = WorkerState.READY
                self.dispatch(events.CapacityIncreased())
            case WorkerState.READY if choice == "park" and worker.accepts_calls:
                worker.state = WorkerState.PARKING if worker.slots.in_use else WorkerState.PARKED
                self.dispatch(events.CapacityDecreased())
            case WorkerState.READY | WorkerState.PARKING | WorkerState.PARKED if choice == "drain":
                worker.state = WorkerState.DRAINING
                worker.is_drained = not worker.slots.in_use
                self.dispatch(events.CapacityDecreased())

    @precondition(lambda self: self.holding)
    @rule(index=INDEX, within_s=st.sampled_from([10.0, 60.0]), is_reported=st.booleans(), is_removed=st.booleans())
    def die(self, index: int, within_s: float, is_reported: bool, is_removed: bool) -> None:
        """A worker's socket closes, before or after the agent reports its exit; its assignment may be deleted."""
        worker = pick(self.holding, index)
        if is_reported:
            self.exits[worker.id] = pick(list(EXITS), index)
        if is_removed:
            del self.capacity.workers[worker.id]
        self.lose(worker, within_s)

    @property
    def holding(self) -> list[Worker]:
        """Live workers with attempts."""
        return [worker for worker in self.live if worker.slots.in_use]

    def lose(self, worker: Worker, within_s: float) -> None:
        worker.explained_within_s = within_s
        self.retire(worker)
        self.dispatch(events.WorkerLost(worker, within_s))

    @property
    def dead(self) -> list[Worker]:
        return [worker for worker in self.capacity.workers.values() if not worker.state.live]

    @precondition(lambda self: self.dead)
    @rule(index=INDEX)
    def remove(self, index: int) -> None:
        """The assignment of a worker that is gone is deleted."""
        worker = self.capacity.workers.pop(pick(self.dead, index).id)
        self.lose(worker, min(worker.explained_within_s, 60.0))

    @precondition(lambda self: self.awaited)
    @rule(index=INDEX, exit_=st.sampled_from(EXITS))
    def report_exit(self, index: int, exit_: Exit) -> None:
        worker = pick(sorted(self.awaited), index)
        self.exits[worker] = exit_
        self.report(worker)

    # --- the time -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.here or self.capacity.backlog.is_closed)
    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 2.0, 5.0, 40.0]), is_late=st.booleans())
    def tick(self, seconds: float, is_late: bool) -> None:
        """Time passes. Frames since the last tick may not have been handled."""
        self.monotonic += seconds
        self.unix += seconds
        cutoff = self.ticked_at if is_late else self.monotonic
        self.ticked_at = self.monotonic
        self.dispatch(events.Ticked(cutoff))
        for attempt in self.attempts:
            if attempt.state is not S.ENDED:
                assert self.monotonic - attempt.touched_at < TOUCH_EVERY_S, "NATS would deliver it again"
            if attempt.state is S.WAITING:
                assert cutoff < attempt.expires_at
            if attempt.state in IN_WORKER:
                ending = attempt.run.ending
                assert cutoff < attempt.run.must_end_at if ending is None else cutoff < ending.until
            if attempt.state is S.LOST:
                assert cutoff < attempt.run.lost_at + self.of(attempt).explained_within_s

    def close(self) -> None:
        """The runner ends. Its workers live on."""
        self.is_closed = True
        for worker in self.workers.values():
            self.revoke_turns(worker)
            if worker.state.live:
                worker.state = WorkerState.STOPPED
        self.dispatch(events.Closed())

    # --- invariants after each step -----------------------------------------------------------------------------------

    @invariant()
    def the_slots_in_use_are_those_of_the_attempts(self) -> None:
        for worker in self.workers.values():
            attempts = [attempt for attempt in self.attempts if attempt.worker is worker]
            held = sum(attempt.state is not S.ENDED for attempt in attempts)
            poisoned = sum(
                attempt.state is S.ENDED and attempt.begun is not None and attempt not in self.answered
                for attempt in attempts
            )
            assert worker.slots.in_use == held + len(worker.unadopted)
            assert worker.slots.poisoned == poisoned
            assert worker.slots.free >= 0
            assert len({attempt.number for attempt in attempts}) == len(attempts)

    @invariant()
    def each_attempt_is_where_its_state_says(self) -> None:
        live = self.here
        assert {*self.running} == {attempt for attempt in live if attempt.state in IN_WORKER}
        assert all((attempt.begun is None) is (attempt.state in UNBEGUN) for attempt in live)
        if not self.is_closed:
            assert {*self.machine.attempts()} == {attempt for attempt in live if attempt.state not in UNBEGUN}
            assert self.machine.is_busy is bool(live)
            assert self.awaited == {attempt.worker.id for attempt in live if attempt.state is S.LOST}
        waiting = [attempt for worker in self.workers.values() for attempt in worker.turns]
        assert {*waiting} == {attempt for attempt in live if attempt.state is S.WAITING}

    @invariant()
    def each_delivery_is_settled_or_here(self) -> None:
        here = {attempt.delivery for attempt in self.here}
        here |= {call.delivery for call in self.capacity.backlog}
        assert {delivery for delivery in self.deliveries if not delivery.settled} == here

    @invariant()
    def the_room_is_that_of_the_free_slots_and_the_backlog(self) -> None:
        links, backlog = list(self.capacity.workers.values()), self.capacity.backlog
        taking = [worker for worker in links if worker.accepts_calls]
        must_take_turns = any(worker.must_take_turns for worker in links)
        longest = 0 if must_take_turns else backlog.max_length(len(taking) * self.revision.spec.concurrency)
        assert self.capacity.free == sum(worker.slots.free for worker in taking)
        assert self.capacity.room() == self.capacity.free + longest - len(backlog)
        if backlog:
            assert taking
            assert backlog.is_short

    @invariant()
    def no_empty_worker_is_left(self) -> None:
        """Check that the runner drains each worker that has to end and has no attempt."""
        for worker in self.live:
            if not worker.slots.in_use:
                assert not worker.slots.poisoned
                assert worker.is_drained or worker.state is not WorkerState.DRAINING
                assert worker.state is not WorkerState.PARKING

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "machine") or self.is_dispatching:
            return  # it has failed
        if not self.closes_early:
            self.settle_all(range(6))
            self.check_all_ended()
            self.end_all_calls()
        self.close()
        self.check_closed()

    def settle_all(self, choices: Iterable[int]) -> None:
        """Answer all that is open. Lookups are answered by `choices`; some exits are never reported."""
        choice = itertools.cycle(choices)
        while self.unfinished:
            self.decide(self.unfinished.pop(), is_found=True)
        for _ in range(1000):
            if self.lookups:
                self.answer_lookup(self.lookups.pop(), next(choice))
            elif self.with_turns:
                self.grant_turns(0, 1)
            elif self.running:
                self.send_result(self.running[0])
            elif self.awaited and next(choice) % 2:
                self.report_exit(0, EXITS[0])
            elif self.awaited:
                self.tick(61.0, is_late=False)
            elif self.with_leftovers:
                self.free_leftover(0, "")
            else:
                break
            self.check()
        self.tick(0.1, is_late=False)

    def check(self) -> None:
        for holds in self.invariants_:
            holds(self)

    def check_all_ended(self) -> None:
        assert all(attempt.state is S.ENDED for attempt in self.attempts)
        assert all(len(delivery.settled) == 1 for delivery in self.deliveries)
        assert not self.machine.is_busy
        assert not self.capacity.backlog

    def end_all_calls(self) -> None:
        """With a worker that works, and time, each call ends."""
        for worker in list(self.live):
            self.lose(worker, 10.0)
        self.make_ready(self.assign())
        for _ in range(20 * len(self.calls)):
            if not self.queued:
                break
            self.monotonic += 2.0  # a retry is due
            self.unix += 2.0
            self.hand_over(self.queued[0])
            self.settle_all([4, 5])
        assert all(call.is_ended for call in self.calls)
        self.check_all_ended()

    def check_closed(self) -> None:
        """Check that no attempt begins. Running calls remain for the next runner, or for redelivery by NATS."""
        while self.lookups:
            self.answer_lookup(self.lookups.pop(), 4)
        left = {attempt.delivery for attempt in self.attempts if attempt.state in (*IN_WORKER, S.LOST)}
        assert {delivery for delivery in self.deliveries if not delivery.settled} == left
        assert all(attempt.state not in UNBEGUN for attempt in self.attempts)

    invariants_: tuple[Callable[[Node], None], ...] = (
        the_slots_in_use_are_those_of_the_attempts,
        each_attempt_is_where_its_state_says,
        each_delivery_is_settled_or_here,
        the_room_is_that_of_the_free_slots_and_the_backlog,
        no_empty_worker_is_left,
    )


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=150, stateful_step_count=40)
