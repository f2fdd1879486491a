"""What the state machine does for each event in each state. Time is passed in; nothing waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from gpufn_core.domain.invocation import InvocationState, Outcome, OutcomeKind, Settlement, StartReason
from gpufn_core.domain.worker import ColdStart, Exit, WorkerState
from gpufn_core.errors import DeviceFailed, InvocationCancelled, PlatformStopping, ResultNotEncodable, WorkerLost
from gpufn_core.protocol.frames import STREAM_WINDOW, Unfinished
from gpufn_core.protocol.records import BodyReference, CallRecord, StartNote
from gpufn_core.spec.function_spec import Batch, CallKind, Retry
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import Attempt, AttemptState
from gpufn_runtime.runner.core.machine import ACK_WAIT_S, NOTED_AFTER_S, TOUCH_EVERY_S
from tests.runtime.runner.core.bench import NOW, RAISED, START, Bench, FakeDelivery, FakeWorker, message_of

KILLED = Exit(signal=9)
LATER = WorkerLost("not now").info()
NEVER = math.inf
REFERENCE = BodyReference("i-1", "digest", 1 << 20)


@pytest.fixture
def bench() -> Bench:
    """A machine of a plain sync function, with one worker of one slot."""
    bench = Bench()
    bench.worker()
    return bench


def shared_by_time(**options: Any) -> Bench:
    """A machine whose worker shares its GPU with workers of other functions."""
    bench = Bench(**options)
    bench.worker(gpu="GPU-1", must_take_turns=True, needs_turn=True)
    return bench


def waiting(bench: Bench, **delivery: Any) -> Attempt:
    """An attempt that waits for a turn on the GPU."""
    bench.arrive(**delivery)
    return bench.one(actions.RequestTurn).attempt


def preparing(bench: Bench, **delivery: Any) -> Attempt:
    bench.arrive(message_of(reference=REFERENCE), **delivery)
    return bench.one(actions.GetArguments).attempt


def checking_record(bench: Bench, delivered: int = 2, **message: Any) -> Attempt:
    bench.arrive_submitted(delivered=delivered, **message)
    return bench.one(actions.CheckRecord).attempt


def checking_caller(bench: Bench) -> Attempt:
    bench.arrive(delivered=2)
    return bench.one(actions.CheckCaller).attempt


def running(bench: Bench) -> Attempt:
    return bench.start()


def stopping(bench: Bench) -> Attempt:
    attempt = bench.start()
    bench.cancel(attempt)
    return attempt


def lost(bench: Bench) -> Attempt:
    attempt = bench.start()
    bench.lose(attempt.link)  # type: ignore[arg-type]
    return attempt


def record_of(state: InvocationState, attempt: int = 1) -> CallRecord:
    return CallRecord(id="i-1", function="f", revision=1, state=state, submitted_at=NOW - 1, attempt=attempt)


def note_of(attempt: int = 1, delivered: int = 1, **fields: Any) -> StartNote:
    return StartNote(
        seq=1, delivered=delivered, attempt=attempt, reason=StartReason.FIRST, node="n", worker="w-0",
        started_at=NOW - 5, **fields,
    )  # fmt: skip


# --- arrival ----------------------------------------------------------------------------------------------------------


def test_a_call_begins_in_a_free_slot(bench: Bench) -> None:
    delivery = bench.arrive(body=b"[1]")
    sent = bench.one(actions.SendRun)
    assert bench.kinds == [actions.SendRun]
    assert (sent.attempt.delivery, sent.attempt.state, sent.body) == (delivery, AttemptState.RUNNING, b"[1]")
    assert bench.capacity.links["w-1"].attempts == {1: sent.attempt}
    assert (bench.capacity.free, bench.capacity.links["w-1"].idle_since) == (0, None)


@pytest.mark.parametrize(
    ("retries", "delay_s"), [(Retry(1, delay_s=10.0), 5.0), (Retry(1, delay_s=3.0), 3.0), (None, 0)]
)
def test_a_retry_that_is_not_due_returns_to_its_queue(retries: Retry | None, delay_s: float) -> None:
    """Not for longer than its policy demands: the clock may have been set back."""
    bench = Bench(retries=retries)
    bench.worker()
    delivery = bench.arrive(message_of(not_before=NOW + 5.0, attempt=2))
    assert bench.kinds == [actions.Nak, actions.OfferCredits]
    assert (bench.one(actions.Nak).delivery, bench.one(actions.Nak).delay_s) == (delivery, delay_s)


@pytest.mark.parametrize(
    ("queue_timeout_s", "fields", "delivered", "is_expired"),
    [
        (None, {"deadline": NOW}, 1, True),
        (None, {"deadline": NOW + 0.1}, 1, False),
        (1.0, {}, 1, True),
        (1.1, {}, 1, False),
        (1.0, {"attempt": 2}, 1, False),
        (1.0, {}, 2, False),
        (1.0, {"may_have_begun": True}, 1, False),
    ],
)
def test_a_call_expires_at_its_deadline_and_an_unstarted_one_at_the_queue_timeout(
    queue_timeout_s: float | None, fields: dict[str, Any], delivered: int, is_expired: bool
) -> None:
    bench = Bench(queue_timeout_s=queue_timeout_s)
    bench.worker()
    bench.arrive(message_of(**fields), delivered=delivered)
    kinds = [action.outcome.kind for action in bench.all(actions.Refuse)]
    assert kinds == ([OutcomeKind.EXPIRED] if is_expired else [])
    assert (actions.OfferCredits in bench.kinds) is is_expired


def test_a_long_call_without_a_free_slot_returns_to_its_queue(bench: Bench) -> None:
    bench.start()
    delivery = bench.arrive()
    assert bench.kinds == [actions.Nak, actions.CountReturned]
    assert bench.one(actions.Nak).delivery is delivery
    assert not bench.capacity.backlog


def test_a_short_call_without_a_free_slot_waits_in_the_backlog(bench: Bench) -> None:
    bench.make_calls_short()
    first = bench.start()
    second = bench.arrive()
    assert bench.actions == []
    assert [call.delivery for call in bench.capacity.backlog] == [second]
    bench.result(first)
    assert bench.one(actions.SendRun).attempt.delivery is second


def test_a_short_call_returns_to_its_queue_if_no_worker_takes_calls() -> None:
    bench = Bench()
    bench.make_calls_short()
    bench.arrive()
    assert bench.kinds == [actions.Nak, actions.CountReturned]


def test_a_returned_fast_path_call_does_not_wait_in_a_queue(bench: Bench) -> None:
    bench.start()
    bench.arrive(is_direct=True)
    assert bench.kinds == [actions.Nak]


@pytest.mark.parametrize(("delivered", "is_refused"), [(100, False), (101, True)])
def test_a_call_that_was_delivered_too_often_is_lost(bench: Bench, delivered: int, is_refused: bool) -> None:
    bench.arrive(delivered=delivered)
    kinds = [action.outcome.kind for action in bench.all(actions.Refuse)]
    assert kinds == ([OutcomeKind.LOST] if is_refused else [])


def test_a_call_of_an_unknown_method_is_rejected(bench: Bench) -> None:
    bench.arrive(message_of(method="nope"))
    assert bench.kinds == [actions.Refuse, actions.OfferCredits]
    assert bench.one(actions.Refuse).outcome.kind is OutcomeKind.REJECTED
    assert bench.capacity.free == 1


def test_a_call_goes_to_the_worker_with_the_most_free_slots() -> None:
    bench = Bench(concurrency=2)
    bench.worker("w-1")
    bench.worker("w-2")
    assert [bench.start().link.worker for _ in range(4)] == ["w-1", "w-2", "w-1", "w-2"]


def test_a_worker_that_needs_no_turn_comes_first() -> None:
    bench = Bench(concurrency=2)
    bench.worker("w-1", gpu="GPU-1", needs_turn=True, must_take_turns=True)
    bench.worker("w-2")
    assert [bench.start().link.worker for _ in range(2)] == ["w-2", "w-2"]


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.DRAINING, WorkerState.PARKING, WorkerState.PARKED])
def test_only_a_ready_worker_takes_calls(state: WorkerState) -> None:
    bench = Bench()
    bench.worker(state=state)
    bench.arrive()
    assert actions.Nak in bench.kinds


def test_a_later_attempt_has_the_reason_of_its_start(bench: Bench) -> None:
    bench.arrive(message_of(attempt=2))
    assert bench.one(actions.SendRun).attempt.reason is StartReason.RAISED


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"shared_body": "a"}, {"reference": REFERENCE}])
def test_arguments_that_are_not_in_the_message_are_requested(bench: Bench, fields: dict[str, Any]) -> None:
    bench.arrive(message_of(**fields))
    assert bench.kinds == [actions.GetArguments]
    assert bench.one(actions.GetArguments).attempt.state is AttemptState.PREPARING
    assert bench.capacity.free == 0


def test_a_call_begins_when_its_arguments_are_ready(bench: Bench) -> None:
    attempt = preparing(bench)
    bench.handle(events.ArgumentsReady(attempt, "args"))
    sent = bench.one(actions.SendRun)
    assert (sent.run.shared_body, sent.body) == ("args", b"")


@pytest.mark.parametrize("state", [WorkerState.FAILED, WorkerState.STOPPED])
def test_a_call_whose_worker_is_gone_when_its_arguments_are_ready_returns(bench: Bench, state: WorkerState) -> None:
    attempt = preparing(bench)
    bench.capacity.links["w-1"].state = state
    bench.handle(events.ArgumentsReady(attempt, "args"))
    assert bench.kinds == [actions.DropBody, actions.Release, actions.Nak]
    assert attempt.state is AttemptState.ENDED


@pytest.mark.parametrize("state", [WorkerState.READY, WorkerState.PARKING, WorkerState.DRAINING])
def test_a_call_that_got_its_slot_before_its_worker_drains_or_parks_begins(bench: Bench, state: WorkerState) -> None:
    attempt = preparing(bench)
    bench.capacity.links["w-1"].state = state
    bench.handle(events.ArgumentsReady(attempt, "args"))
    assert actions.SendRun in bench.kinds


def test_a_call_whose_arguments_are_lost_ends(bench: Bench) -> None:
    attempt = preparing(bench)
    bench.handle(events.ArgumentsFailed(attempt, LATER, is_lost=True))
    assert bench.one(actions.Refuse).outcome == Outcome(OutcomeKind.LOST, LATER)
    assert bench.kinds[-2:] == [actions.SlotChanged, actions.OfferCredits]
    assert bench.capacity.free == 1


def test_a_call_whose_arguments_cannot_be_fetched_now_returns_for_a_second(bench: Bench) -> None:
    attempt = preparing(bench)
    bench.handle(events.ArgumentsFailed(attempt, LATER, is_lost=False))
    assert bench.kinds == [actions.Release, actions.Nak, actions.SlotChanged, actions.OfferCredits]
    assert bench.one(actions.Nak).delay_s == 1.0


# --- turns ------------------------------------------------------------------------------------------------------------


def test_a_call_waits_for_a_turn_on_a_gpu_that_is_shared_by_time() -> None:
    bench = shared_by_time()
    attempt = waiting(bench)
    assert (bench.kinds, attempt.state) == ([actions.RequestTurn], AttemptState.WAITING)
    bench.handle(events.TurnGranted(attempt))
    assert (bench.kinds, attempt.state) == ([actions.SendRun], AttemptState.RUNNING)


def test_arguments_are_fetched_before_a_turn_is_requested() -> None:
    bench = shared_by_time()
    attempt = preparing(bench)
    bench.handle(events.ArgumentsReady(attempt, "args"))
    assert bench.kinds == [actions.RequestTurn]


def test_a_call_that_was_delivered_before_is_looked_up_in_its_turn() -> None:
    bench = shared_by_time()
    attempt = waiting(bench, delivered=2)
    bench.handle(events.TurnGranted(attempt))
    assert (bench.kinds, attempt.state) == ([actions.CheckCaller], AttemptState.CHECKING)


def test_a_call_whose_turn_is_revoked_returns_to_its_queue() -> None:
    bench = shared_by_time()
    attempt = waiting(bench)
    bench.handle(events.TurnsRevoked([attempt]))
    assert bench.kinds == [actions.Release, actions.Nak]
    assert bench.one(actions.Nak).delivery is attempt.delivery
    assert bench.capacity.links["w-1"].slots.in_use == 0


def test_a_turn_that_is_granted_or_revoked_too_late_changes_nothing() -> None:
    bench = shared_by_time()
    attempt = waiting(bench)
    bench.cancel(attempt)
    assert bench.handle(events.TurnGranted(attempt)) == []
    assert bench.handle(events.TurnsRevoked([attempt])) == []


@pytest.mark.parametrize(("seconds", "is_expired"), [(0.9, False), (1.0, True)])
def test_a_call_that_waits_for_a_turn_expires(seconds: float, is_expired: bool) -> None:
    bench = shared_by_time(queue_timeout_s=2.0)
    attempt = waiting(bench)  # it was submitted 1 s ago
    bench.tick(seconds)
    assert (attempt.state is AttemptState.ENDED) is is_expired
    assert [action.outcome.kind for action in bench.all(actions.Refuse)] == [OutcomeKind.EXPIRED] * is_expired


def test_a_call_without_a_deadline_waits_for_its_turn_for_ever() -> None:
    bench = shared_by_time()
    attempt = waiting(bench)
    bench.tick(1e6)
    assert (attempt.expires_at, attempt.state) == (NEVER, AttemptState.WAITING)


# --- lookups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delivered", "attempt", "checks"), [(1, 1, []), (1, 2, [False]), (2, 1, [True]), (3, 2, [True])]
)
def test_the_record_of_a_submitted_call_that_may_have_started_is_checked(
    bench: Bench, delivered: int, attempt: int, checks: list[bool]
) -> None:
    bench.arrive_submitted(delivered=delivered, attempt=attempt)
    assert [action.is_repeated for action in bench.all(actions.CheckRecord)] == checks


@pytest.mark.parametrize(
    ("delivery", "checks"),
    [
        ({}, []),
        ({"delivered": 2}, [True]),
        ({"caller_was_away": True}, [False]),
        ({"caller_was_away": True, "is_direct": True}, []),
    ],
)
def test_the_caller_of_a_call_is_checked_if_the_caller_may_be_gone(
    bench: Bench, delivery: dict[str, Any], checks: list[bool]
) -> None:
    bench.arrive(**delivery)
    assert [action.is_repeated for action in bench.all(actions.CheckCaller)] == checks


def test_a_submitted_call_without_a_record_begins(bench: Bench) -> None:
    attempt = checking_record(bench)
    bench.handle(events.RecordChecked(attempt))
    assert bench.kinds == [actions.SendRun, actions.AnnounceStart, actions.NoteStart]
    assert (attempt.message.attempt, attempt.reason) == (2, StartReason.RUNNER_LOST)


def test_a_repeated_start_is_numbered_after_its_note(bench: Bench) -> None:
    attempt = checking_record(bench)
    note = note_of(attempt=4, interrupted=StartReason.DEVICE_FAILED, message="no GPU")
    bench.handle(events.RecordChecked(attempt, record_of(InvocationState.RUNNING), note=note))
    assert bench.one(actions.SendRun).run.number == 5
    assert attempt.reason is StartReason.DEVICE_FAILED
    assert [record.message for record in attempt.message.attempts] == ["no GPU"]


def test_a_retry_that_was_delivered_once_keeps_its_number(bench: Bench) -> None:
    attempt = checking_record(bench, delivered=1, attempt=2)
    bench.handle(events.RecordChecked(attempt, record_of(InvocationState.QUEUED, attempt=2)))
    assert bench.one(actions.SendRun).run.number == 2
    assert actions.NoteStart not in bench.kinds


def test_a_fast_path_call_that_may_have_begun_has_the_next_number(bench: Bench) -> None:
    bench.arrive(message_of(may_have_begun=True))
    attempt = bench.one(actions.SendRun).attempt
    assert (attempt.message.attempt, attempt.reason) == (2, StartReason.RUNNER_LOST)


@pytest.mark.parametrize(
    ("checked", "action"),
    [
        ({"record": record_of(InvocationState.SUCCEEDED)}, actions.Confirm),
        ({"record": record_of(InvocationState.CANCELLED)}, actions.Confirm),
        ({"record": record_of(InvocationState.QUEUED, attempt=2)}, actions.AckSuperseded),
        ({"is_elsewhere": True}, actions.Nak),
    ],
)
@pytest.mark.parametrize("state", [WorkerState.READY, WorkerState.DRAINING])
def test_a_submitted_call_does_not_begin_if(
    bench: Bench, checked: dict[str, Any], action: type[actions.Action], state: WorkerState
) -> None:
    attempt = checking_record(bench)
    bench.capacity.links["w-1"].state = state
    bench.handle(events.RecordChecked(attempt, **checked))
    assert bench.kinds == [actions.Release, action, actions.SlotChanged, actions.OfferCredits]
    assert attempt.state is AttemptState.ENDED


@pytest.mark.parametrize(
    ("checked", "action"),
    [
        ({"is_waited_for": False}, actions.Refuse),
        ({"is_waited_for": None}, actions.Nak),
        ({"is_waited_for": True, "is_elsewhere": True}, actions.Nak),
    ],
)
def test_a_call_whose_caller_was_looked_up_does_not_begin_if(
    bench: Bench, checked: dict[str, Any], action: type[actions.Action]
) -> None:
    attempt = checking_caller(bench)
    bench.handle(events.CallerChecked(attempt, **checked))
    kinds = [kind for kind in bench.kinds if kind is not actions.OfferCredits]
    assert kinds == [actions.Release, action, actions.SlotChanged]
    assert actions.OfferCredits in bench.kinds


def test_a_call_whose_caller_waits_begins_under_its_next_number(bench: Bench) -> None:
    attempt = checking_caller(bench)
    bench.handle(events.CallerChecked(attempt, is_waited_for=True))
    assert bench.kinds == [actions.SendRun]
    assert bench.one(actions.SendRun).run.number == 2


@pytest.mark.parametrize(("checked", "delay_s"), [({"is_elsewhere": True}, ACK_WAIT_S), ({}, 1.0)])
def test_a_call_comes_back_when_another_runner_or_the_caller_may_have_answered(
    bench: Bench, checked: dict[str, Any], delay_s: float
) -> None:
    bench.handle(events.CallerChecked(checking_caller(bench), **checked))
    assert bench.one(actions.Nak).delay_s == delay_s


@pytest.mark.parametrize("is_submitted", [True, False])
def test_a_call_whose_worker_is_gone_after_the_lookup_returns(bench: Bench, is_submitted: bool) -> None:
    attempt = checking_record(bench) if is_submitted else checking_caller(bench)
    bench.lose(bench.capacity.links["w-1"])
    answer = events.RecordChecked(attempt) if is_submitted else events.CallerChecked(attempt, is_waited_for=True)
    bench.handle(answer)
    assert bench.kinds == [actions.Release, actions.Nak]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_frame_says_all_that_the_worker_needs(bench: Bench) -> None:
    message = message_of("i-7", deadline=NOW + 10, trace="00-1-2-01")
    bench.arrive(message, settled_at="$JS.ACK.1")
    run = bench.one(actions.SendRun).run
    assert (run.attempt, run.invocation, run.number, run.trace, run.delivery) == (1, "i-7", 1, "00-1-2-01", "$JS.ACK.1")
    assert (run.deadline, run.stream, run.credits, run.takes_shared_body) == (NOW + 10, False, 0, True)


@pytest.mark.parametrize(
    ("kind", "stream", "granted"),
    [
        (CallKind.GENERATOR, True, STREAM_WINDOW),
        (CallKind.ASYNC_GENERATOR, True, STREAM_WINDOW),
        (CallKind.GENERATOR, False, 0),
        (CallKind.SYNC, True, 0),
    ],
)
def test_a_stream_begins_with_one_window_of_credit(kind: CallKind, stream: bool, granted: int) -> None:
    bench = Bench(kind)
    bench.worker()
    bench.arrive(message_of(stream=stream))
    run = bench.one(actions.SendRun).run
    assert (run.stream, run.credits, run.takes_shared_body) == (granted > 0, granted, not stream)


@pytest.mark.parametrize(
    ("queue_timeout_s", "fields", "is_direct", "is_announced"),
    [
        (None, {"reply": ""}, False, True),
        (None, {}, False, False),
        (9.0, {}, False, True),
        (9.0, {}, True, False),
    ],
)
def test_a_start_is_announced_to_callers_that_depend_on_it(
    queue_timeout_s: float | None, fields: dict[str, Any], is_direct: bool, is_announced: bool
) -> None:
    bench = Bench(queue_timeout_s=queue_timeout_s)
    bench.worker()
    bench.arrive(message_of(**fields), is_direct=is_direct)
    assert (actions.AnnounceStart in bench.kinds) is is_announced


def test_a_submitted_call_that_lasts_is_noted_once(bench: Bench) -> None:
    attempt = bench.start_submitted()
    assert actions.NoteStart not in [type(action) for action in bench.tick(NOTED_AFTER_S - 0.01)]
    bench.tick(0.01)
    assert bench.one(actions.NoteStart).attempt is attempt
    bench.tick()
    assert actions.NoteStart not in bench.kinds


def test_a_call_whose_caller_waits_is_not_noted(bench: Bench) -> None:
    bench.start()
    bench.tick(NOTED_AFTER_S)
    assert actions.NoteStart not in bench.kinds


@pytest.mark.parametrize(("submitted_at", "is_cold"), [(NOW - 1, True), (NOW + 1, False)])
def test_a_call_that_waited_for_its_worker_to_start_is_cold(submitted_at: float, is_cold: bool) -> None:
    bench = Bench()
    bench.worker(cold_start=ColdStart(load_s=1.0))
    bench.wait(2.0)
    bench.arrive(message_of(submitted_at=submitted_at))
    assert bench.one(actions.SendRun).attempt.run.is_cold is is_cold


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_result_settles_the_call_and_frees_the_slot(bench: Bench) -> None:
    attempt = bench.start()
    bench.wait(2.0)
    bench.result(attempt, body=b"42", run_s=1.5)
    assert bench.kinds == [
        actions.Release, actions.Charge, actions.Settle, actions.SlotChanged, actions.OfferCredits,
    ]  # fmt: skip
    settled = bench.one(actions.Settle)
    assert (settled.outcome.kind, settled.settlement, settled.body) == (OutcomeKind.SUCCEEDED, Settlement.ACK, b"42")
    assert (settled.run_s, settled.gather_s) == (1.5, 0.0)
    assert (attempt.state, bench.capacity.free) == (AttemptState.ENDED, 1)


@pytest.mark.parametrize(("retries", "settlement"), [(None, Settlement.ACK), (Retry(1), Settlement.RETRY)])
def test_an_exception_is_logged_and_settled_by_the_policy(retries: Retry | None, settlement: Settlement) -> None:
    bench = Bench(retries=retries)
    bench.worker()
    bench.result(bench.start(), OutcomeKind.RAISED, RAISED, body=b"ignored")
    settled = bench.one(actions.Settle)
    assert (settled.outcome.error, settled.settlement, settled.body) == (RAISED, settlement, b"")
    assert bench.one(actions.LogFailure).error == RAISED
    assert bench.one(actions.Charge).is_failed


def test_an_attempt_whose_gpu_failed_is_handed_back_and_not_charged(bench: Bench) -> None:
    attempt = bench.start()
    bench.result(attempt, OutcomeKind.LOST, DeviceFailed("broken").info())
    handed_back = bench.one(actions.HandBack)
    assert (handed_back.attempt, handed_back.reason, handed_back.message) == (
        attempt, StartReason.DEVICE_FAILED, "broken",
    )  # fmt: skip
    assert not {actions.Settle, actions.Charge} & set(bench.kinds)


def test_a_large_result_is_collected_before_it_is_settled(bench: Bench) -> None:
    attempt = bench.start()
    bench.result(attempt, shared_body="r")
    assert actions.Settle not in bench.kinds
    collected = bench.one(actions.CollectResult)
    assert bench.kinds[-1] is actions.OfferCredits
    bench.handle(events.ResultCollected(attempt, collected.result, Outcome(OutcomeKind.SUCCEEDED), "p", "k"))
    settled = bench.one(actions.Settle)
    assert (settled.shared_body, settled.runner_file, settled.outcome.kind) == ("p", "k", OutcomeKind.SUCCEEDED)


def test_the_gather_time_of_a_large_result_ends_when_the_result_arrives() -> None:
    """Bug: it included the time that the runner took to collect the file."""
    bench = Bench(batch=Batch(max_size=4))
    bench.worker()
    attempt = bench.start()
    bench.wait(0.5)
    bench.result(attempt, run_s=0.2, shared_body="r")
    collected = bench.one(actions.CollectResult)
    bench.wait(1.0)
    bench.handle(events.ResultCollected(attempt, collected.result, Outcome(OutcomeKind.SUCCEEDED), "p", "k"))
    assert bench.one(actions.Settle).gather_s == pytest.approx(0.3)


def test_a_large_result_that_cannot_be_collected_fails_the_call(bench: Bench) -> None:
    attempt = bench.start()
    bench.result(attempt, shared_body="r")
    outcome = Outcome(OutcomeKind.RAISED, ResultNotEncodable("gone").info())
    bench.handle(events.ResultCollected(attempt, bench.one(actions.CollectResult).result, outcome))
    assert bench.kinds == [actions.LogFailure, actions.Charge, actions.Settle]
    assert bench.machine.failed == 1


def test_a_large_result_of_a_call_that_did_not_succeed_is_dropped(bench: Bench) -> None:
    attempt = stopping(bench)
    bench.result(attempt, shared_body="r")
    assert (bench.one(actions.DropBody).shared_body, actions.CollectResult in bench.kinds) == ("r", False)
    assert bench.one(actions.Settle).outcome.kind is OutcomeKind.CANCELLED


@pytest.mark.parametrize("claimed_s", [-1.0, 3.0, math.inf, math.nan])
def test_a_run_time_that_cannot_be_is_replaced_by_the_elapsed_time(bench: Bench, claimed_s: float) -> None:
    attempt = bench.start()
    bench.wait(2.0)
    bench.result(attempt, run_s=claimed_s)
    assert (bench.one(actions.Settle).run_s, bench.one(actions.Charge).run_s) == (2.0, 2.0)
    assert attempt.run.busy_s == 2.0


def test_a_call_of_a_batch_is_charged_its_share() -> None:
    bench = Bench(batch=Batch(max_size=4))
    bench.worker()
    attempt = bench.start()
    bench.wait(2.0)
    bench.result(attempt, run_s=1.5, charged_s=0.5)
    settled = bench.one(actions.Settle)
    assert (settled.run_s, settled.gather_s, bench.one(actions.Charge).run_s) == (1.5, 0.5, 0.5)


def test_two_concurrent_calls_share_the_gpu_seconds() -> None:
    bench = Bench(concurrency=2)
    bench.worker(gpus_charged=0.5)
    first, second = bench.start(), bench.start()
    bench.wait(2.0)
    bench.result(first, run_s=2.0)
    bench.wait(1.0)
    bench.result(second, run_s=3.0)
    assert (first.gpu_s, second.gpu_s, bench.machine.gpu_seconds) == (0.5, 1.0, 1.5)


# --- timeouts and cancels ---------------------------------------------------------------------------------------------


def test_a_sync_function_that_times_out_is_given_up_at_once() -> None:
    """It cannot be interrupted: its slot is poisoned, and its worker ends."""
    bench = Bench(timeout_s=3.0)
    worker = bench.worker()
    attempt = bench.start()
    bench.tick(2.9)
    assert attempt.state is AttemptState.RUNNING
    bench.tick(0.1)
    assert bench.kinds[:3] == [actions.SendStop, actions.RevokeTurns, actions.Release]
    assert bench.one(actions.Settle).outcome.kind is OutcomeKind.TIMED_OUT
    assert (worker.slots.poisoned, bench.capacity.free, bench.machine.failed) == (1, 0, 1)


def test_an_async_function_that_times_out_has_a_second_to_stop() -> None:
    bench = Bench(CallKind.ASYNC, timeout_s=3.0)
    worker = bench.worker()
    attempt = bench.start()
    bench.tick(3.0)
    assert (len(bench.all(actions.SendStop)), attempt.state) == (1, AttemptState.STOPPING)
    bench.tick(0.9)
    assert (bench.all(actions.SendStop), worker.slots.poisoned) == ([], 0)
    bench.tick(0.1)
    assert bench.one(actions.Settle).outcome.kind is OutcomeKind.TIMED_OUT
    assert worker.slots.poisoned == 1


@pytest.mark.parametrize(
    ("deadline", "reason"), [(0.0, "longer than its timeout of 3 s"), (NOW + 2, "its caller's deadline")]
)
def test_a_call_ends_at_its_timeout_or_its_callers_deadline(deadline: float, reason: str) -> None:
    bench = Bench(timeout_s=3.0)
    bench.worker()
    bench.arrive(message_of(deadline=deadline))
    bench.tick(3.0)
    error = bench.one(actions.Settle).outcome.error
    assert error is not None
    assert reason in error.message


def test_a_result_after_the_timeout_does_not_change_the_outcome() -> None:
    bench = Bench(CallKind.ASYNC, timeout_s=3.0)
    worker = bench.worker()
    attempt = bench.start()
    bench.tick(3.0)
    bench.result(attempt)
    assert bench.one(actions.Settle).outcome.kind is OutcomeKind.TIMED_OUT
    assert (worker.slots.poisoned, bench.capacity.free) == (0, 1)


def test_a_result_that_arrived_before_the_cutoff_wins_over_the_timeout() -> None:
    """Frames that arrived after the cutoff may not have been handled: the timeout is not due before it."""
    bench = Bench(timeout_s=3.0)
    bench.worker()
    attempt = bench.start()
    bench.wait(5.0)
    bench.handle(events.Ticked(START + 2.9))
    assert attempt.state is AttemptState.RUNNING


@pytest.mark.parametrize("prepare", [preparing, checking_caller, checking_record])
def test_a_call_that_is_cancelled_before_it_begins_ends_with_the_next_event(
    prepare: Callable[[Bench], Attempt],
) -> None:
    bench = Bench()
    bench.worker()
    attempt = prepare(bench)
    assert bench.cancel(attempt) == []
    assert attempt.is_cancelled
    bench.handle(
        events.ArgumentsReady(attempt, "args")
        if prepare is preparing
        else events.RecordChecked(attempt)
        if prepare is checking_record
        else events.CallerChecked(attempt, is_waited_for=True)
    )
    assert bench.one(actions.Refuse).outcome.kind is OutcomeKind.CANCELLED
    assert attempt.state is AttemptState.ENDED


def test_a_call_that_waits_for_a_turn_is_cancelled_at_once() -> None:
    bench = shared_by_time()
    bench.cancel(waiting(bench))
    assert bench.kinds == [
        actions.Release, actions.Refuse, actions.OfferCredits, actions.SlotChanged, actions.OfferCredits,
    ]  # fmt: skip
    assert bench.one(actions.Refuse).outcome.kind is OutcomeKind.CANCELLED


def test_a_cancelled_run_has_five_seconds_to_stop(bench: Bench) -> None:
    attempt = stopping(bench)
    assert (bench.kinds, attempt.is_cancelled) == ([actions.SendStop], True)
    bench.tick(4.9)
    assert attempt.state is AttemptState.STOPPING
    bench.tick(0.1)
    assert bench.one(actions.Settle).outcome.kind is OutcomeKind.CANCELLED
    assert bench.capacity.links["w-1"].slots.poisoned == 1


def test_a_second_cancel_or_a_timeout_after_a_cancel_changes_nothing() -> None:
    bench = Bench(CallKind.ASYNC, timeout_s=1.0)
    bench.worker()
    attempt = stopping(bench)
    until = attempt.run.ending.until if attempt.run.ending is not None else NEVER
    assert bench.cancel(attempt) == []
    bench.tick(2.0)
    assert actions.SendStop not in bench.kinds
    assert attempt.run.ending is not None
    assert (attempt.run.ending.kind, attempt.run.ending.until) == (OutcomeKind.CANCELLED, until)


def test_a_result_after_a_cancel_does_not_change_the_outcome(bench: Bench) -> None:
    attempt = stopping(bench)
    bench.result(attempt, body=b"42")
    settled = bench.one(actions.Settle)
    assert (settled.outcome, settled.body) == (Outcome(OutcomeKind.CANCELLED, InvocationCancelled().info()), b"")
    assert bench.capacity.free == 1


def test_a_cancelled_call_of_a_lost_worker_ends_at_the_next_tick(bench: Bench) -> None:
    attempt = lost(bench)
    assert bench.cancel(attempt) == [], "there is no worker to stop it"
    bench.tick()
    assert bench.one(actions.Settle).outcome.kind is OutcomeKind.CANCELLED


def test_a_cancel_of_an_ended_attempt_changes_nothing(bench: Bench) -> None:
    attempt = bench.start()
    bench.result(attempt)
    assert bench.cancel(attempt) == []


def test_a_call_that_its_gateway_withdraws_is_cancelled(bench: Bench) -> None:
    attempt = bench.start(is_direct=True)
    bench.handle(events.Withdrawn(attempt.delivery))
    assert (bench.kinds, attempt.is_cancelled) == ([actions.SendStop], True)
    assert bench.handle(events.Withdrawn(FakeDelivery())) == []


def test_a_withdrawn_call_that_has_not_begun_is_cancelled(bench: Bench) -> None:
    attempt = preparing(bench, is_direct=True)
    bench.handle(events.Withdrawn(attempt.delivery))
    assert attempt.is_unwanted


def test_a_withdrawn_call_in_the_backlog_is_dropped(bench: Bench) -> None:
    bench.make_calls_short()
    first = bench.start()
    delivery = bench.arrive(is_direct=True)
    delivery.is_withdrawn = True
    bench.handle(events.Withdrawn(delivery))
    bench.result(first)
    assert (bench.one(actions.Term).delivery, actions.SendRun in bench.kinds) == (delivery, False)


def test_a_poisoned_slot_takes_no_call_and_its_worker_takes_none_either() -> None:
    bench = Bench(concurrency=2, timeout_s=1.0)
    worker = bench.worker()
    bench.start()
    bench.wait(0.5)
    second = bench.start()
    bench.tick(0.5)
    settled_at = bench.kinds.index(actions.Settle)
    assert bench.kinds[settled_at + 1 :][:3] == [actions.ShrinkCredits, actions.SlotChanged, actions.OfferCredits]
    assert (worker.slots.poisoned, worker.slots.in_use, bench.capacity.free) == (1, 1, 0)
    bench.arrive()
    assert actions.Nak in bench.kinds
    bench.result(second)
    assert (worker.slots.in_use, bench.capacity.free) == (0, 0)


def test_calls_that_wait_for_a_turn_of_a_poisoned_worker_return_before_it_is_empty() -> None:
    """SlotChanged ends a worker that is empty and poisoned: nothing else would."""
    bench = Bench(concurrency=2, timeout_s=1.0)
    worker = bench.worker(gpu="GPU-1", must_take_turns=True)
    first = waiting(bench)
    bench.handle(events.TurnGranted(first))
    second = waiting(bench)
    bench.tick(1.0)
    kinds = bench.kinds
    assert bench.one(actions.Nak).delivery is second.delivery
    assert kinds.index(actions.RevokeTurns) < kinds.index(actions.Nak) < kinds.index(actions.SlotChanged)
    assert (worker.slots.in_use, worker.slots.poisoned) == (0, 1)
    assert bench.handle(events.TurnsRevoked([second])) == [], "they have ended"


# --- lost workers -----------------------------------------------------------------------------------------------------


def test_the_calls_of_a_lost_worker_are_kept_until_its_exit_is_reported() -> None:
    bench = Bench(concurrency=2)
    worker = bench.worker()
    first, second = bench.start(), bench.start()
    bench.lose(worker)
    assert bench.one(actions.AwaitExit).worker == "w-1"
    assert [first.state, second.state] == [AttemptState.LOST] * 2
    assert (bench.machine.is_busy, bench.machine.awaits_exits) == (True, True)
    bench.tick(TOUCH_EVERY_S)
    assert [action.delivery for action in bench.all(actions.Touch)] == [first.delivery, second.delivery]
    assert list(bench.machine.attempts()) == [first, second]
    bench.handle(events.WorkerExited("w-1", KILLED))
    assert bench.one(actions.StopAwaiting).worker == "w-1"
    errors = [action.outcome.error for action in bench.all(actions.Settle)]
    assert [error is not None and "was killed by SIGKILL" in error.message for error in errors] == [True, True]
    assert not bench.machine.awaits_exits


@pytest.mark.parametrize(
    ("exit_", "code"),
    [
        (KILLED, WorkerLost.code),
        (None, WorkerLost.code),
        (Exit(signal=9, device_fault="Xid 79"), DeviceFailed.code),
        (Exit(signal=9, stopping=True), PlatformStopping.code),
    ],
)
def test_the_exit_decides_the_error_of_a_lost_call(exit_: Exit | None, code: str) -> None:
    bench = Bench()
    bench.worker()
    bench.start(delivered=1)
    bench.lose(bench.capacity.links["w-1"])
    bench.handle(events.WorkerExited("w-1", exit_))
    if code == WorkerLost.code:
        error = bench.one(actions.Settle).outcome.error
        assert error is not None
        assert error.code == code
    else:
        assert bench.one(actions.HandBack).reason in (StartReason.DEVICE_FAILED, StartReason.STOPPED)


def test_the_last_output_of_a_lost_worker_is_in_the_error(bench: Bench) -> None:
    lost(bench)
    bench.handle(events.WorkerExited("w-1", Exit(code=3, tail="Segmentation fault")))
    error = bench.one(actions.Settle).outcome.error
    assert error is not None
    assert error.message.endswith("exited with code 3 while it ran this call\nSegmentation fault")


def test_a_lost_call_is_charged_until_its_worker_was_lost(bench: Bench) -> None:
    bench.start()
    bench.wait(2.0)
    bench.lose(bench.capacity.links["w-1"])
    bench.wait(5.0)
    bench.handle(events.WorkerExited("w-1", KILLED))
    assert (bench.one(actions.Charge).run_s, bench.one(actions.Settle).run_s) == (2.0, 2.0)


def test_a_worker_without_calls_needs_no_report(bench: Bench) -> None:
    assert bench.lose(bench.capacity.links["w-1"]) == []
    assert bench.handle(events.WorkerExited("w-1", KILLED)) == []
    assert not bench.machine.is_busy


def test_an_exit_is_reported_once(bench: Bench) -> None:
    lost(bench)
    bench.handle(events.WorkerExited("w-1", KILLED))
    assert bench.handle(events.WorkerExited("w-1", KILLED)) == []


def test_a_lost_call_that_is_late_or_unwanted_waits_no_longer() -> None:
    bench = Bench(timeout_s=60.0, concurrency=2)
    worker = bench.worker()
    late = bench.start(message=message_of(deadline=NOW + 3))
    unwanted = bench.start()
    bench.lose(worker)
    bench.tick(3.0)
    assert [action.attempt for action in bench.all(actions.Settle)] == [late]
    bench.cancel(unwanted)
    bench.tick()
    assert bench.one(actions.Settle).attempt is unwanted
    assert bench.one(actions.StopAwaiting).worker == "w-1"
    assert not bench.machine.is_busy


def test_a_lost_call_that_starts_again_waits_for_the_death_of_its_process() -> None:
    bench = Bench(CallKind.ASYNC, timeout_s=3.0, concurrency=3, retries=Retry(1))
    worker = bench.worker()
    timed_out, late, unwanted = bench.start(), bench.start(), bench.start()
    late.run.must_end_at += 1.0
    bench.tick(3.0)  # the first and the last are stopped
    bench.lose(worker, within_s=60.0)
    unwanted.run.ending = None
    bench.cancel(unwanted)
    bench.tick(59.9)
    assert [action.attempt for action in bench.all(actions.Settle)] == [unwanted]
    assert list(bench.machine.attempts()) == [timed_out, late]
    bench.handle(events.WorkerExited("w-1", KILLED))
    assert [(action.outcome.kind, action.settlement) for action in bench.all(actions.Settle)] == [
        (OutcomeKind.TIMED_OUT, Settlement.RETRY),
        (OutcomeKind.LOST, Settlement.RETRY),
    ]


@pytest.mark.parametrize(("seconds", "is_over"), [(9.9, False), (10.0, True)])
def test_a_report_that_never_comes_is_not_awaited_for_ever(bench: Bench, seconds: float, is_over: bool) -> None:
    attempt = lost(bench)
    bench.tick(seconds)
    assert (attempt.state is AttemptState.ENDED) is is_over
    if is_over:
        error = bench.one(actions.Settle).outcome.error
        assert error is not None
        assert "closed its connection" in error.message


def test_a_batched_call_of_a_lost_worker_is_charged_its_share_of_the_worker() -> None:
    bench = Bench(batch=Batch(max_size=2))
    worker = bench.worker()
    bench.start()
    bench.start()
    bench.wait(2.0)
    bench.lose(worker)
    bench.handle(events.WorkerExited("w-1", KILLED))
    assert [action.run_s for action in bench.all(actions.Charge)] == [1.0, 1.0]


# --- adoption ---------------------------------------------------------------------------------------------------------


def returned(bench: Bench, **fields: Any) -> tuple[FakeWorker, Unfinished]:
    """A worker of an earlier runner that comes back with one attempt, which has a slot."""
    worker = FakeWorker("w-2", bench.revision, **({"state": WorkerState.STARTING} | fields))
    bench.capacity.links["w-2"] = worker
    worker.slots.take()
    return worker, Unfinished(7, "i-1", "$JS.ACK", 2.0, 1)


def test_an_attempt_of_an_earlier_runner_is_adopted_and_keeps_its_deadline() -> None:
    bench = Bench(timeout_s=3.0)
    worker, unfinished = returned(bench)
    delivery, message = FakeDelivery(), message_of(reply="", submitted_at=NOW - 5)
    bench.handle(events.UnfinishedFound(worker, unfinished, delivery, message, counted=1))
    assert bench.kinds == [actions.Adopt, actions.AnnounceStart]
    attempt = bench.one(actions.Adopt).attempt
    assert (attempt.number, attempt.state, worker.attempts) == (7, AttemptState.RUNNING, {7: attempt})
    assert attempt.run.must_end_at == START + 1.0
    assert (worker.slots.in_use, bench.machine.started) == (1, 1)


def test_an_adopted_delivery_is_touched_at_the_next_tick(bench: Bench) -> None:
    worker, unfinished = returned(bench)
    delivery = FakeDelivery()
    bench.handle(events.UnfinishedFound(worker, unfinished, delivery, message_of(), counted=1))
    bench.tick(0.0)
    assert bench.one(actions.Touch).delivery is delivery


def test_an_adopted_attempt_ends_like_any_other(bench: Bench) -> None:
    worker, unfinished = returned(bench)
    bench.handle(events.UnfinishedFound(worker, unfinished, FakeDelivery(), message_of(), counted=1))
    bench.result(bench.one(actions.Adopt).attempt, run_s=2.0)
    assert bench.one(actions.Settle).outcome.kind is OutcomeKind.SUCCEEDED
    assert worker.slots.in_use == 0


@pytest.mark.parametrize("message", [None, message_of(method="nope")])
def test_an_attempt_that_cannot_be_adopted_is_stopped(bench: Bench, message: Any) -> None:
    worker, unfinished = returned(bench)
    delivery = None if message is None else FakeDelivery()
    bench.handle(events.UnfinishedFound(worker, unfinished, delivery, message, counted=1))
    assert bench.kinds == [actions.StopUnfinished]
    assert (bench.one(actions.StopUnfinished).number, worker.slots.in_use) == (7, 1)


def test_an_attempt_of_a_worker_that_is_gone_again_is_ignored(bench: Bench) -> None:
    worker, unfinished = returned(bench, state=WorkerState.FAILED)
    assert bench.handle(events.UnfinishedFound(worker, unfinished, FakeDelivery(), message_of(), counted=1)) == []


def test_a_worker_that_claims_an_impossible_run_time_is_limited(bench: Bench) -> None:
    worker, unfinished = returned(bench)
    claimed = Unfinished(unfinished.attempt, unfinished.invocation, unfinished.delivery, 1e9, 1)
    bench.handle(events.UnfinishedFound(worker, claimed, FakeDelivery(), message_of(), counted=1))
    assert bench.one(actions.Adopt).attempt.run.began == START - 1.0, "it was submitted 1 s ago"


def test_a_slot_that_an_earlier_runner_had_used_is_offered(bench: Bench) -> None:
    worker = bench.capacity.links["w-1"]
    bench.handle(events.SlotFreed(worker, "r"))
    assert bench.kinds == [actions.DropBody, actions.SlotChanged, actions.OfferCredits]
    bench.handle(events.SlotFreed(worker))
    assert bench.kinds == [actions.SlotChanged, actions.OfferCredits]


# --- room -------------------------------------------------------------------------------------------------------------


def test_a_ready_worker_makes_room() -> None:
    bench = Bench()
    bench.worker()
    assert bench.kinds == [actions.ReportRoom, actions.OfferCredits]


def test_less_room_withdraws_credits_and_returns_the_backlog(bench: Bench) -> None:
    bench.make_calls_short()
    bench.start()
    bench.arrive()
    bench.capacity.links["w-1"].state = WorkerState.DRAINING
    bench.handle(events.CapacityDecreased())
    assert bench.kinds == [actions.ShrinkCredits, actions.ReportRoom, actions.Nak, actions.CountReturned]
    assert not bench.capacity.backlog


def test_the_backlog_is_served_in_order_when_a_slot_is_free(bench: Bench) -> None:
    bench.make_calls_short()
    attempt = bench.start()
    deliveries = [bench.arrive() for _ in range(3)]
    for delivery in deliveries:
        bench.result(attempt)
        attempt = bench.one(actions.SendRun).attempt
        assert attempt.delivery is delivery


def test_a_call_that_expires_in_the_backlog_is_refused_and_the_next_one_begins(bench: Bench) -> None:
    bench.make_calls_short()
    first = bench.start()
    expired, second = bench.arrive(message_of(deadline=NOW + 1)), bench.arrive()
    bench.wait(2.0)
    bench.result(first)
    assert bench.one(actions.Refuse).delivery is expired
    assert bench.one(actions.SendRun).attempt.delivery is second


def test_a_call_that_runs_for_long_closes_the_backlog_until_it_ends(bench: Bench) -> None:
    bench.make_calls_short()
    first = bench.start()
    second = bench.arrive()
    bench.tick(0.09)
    assert bench.actions == [], "it may still be short"
    bench.tick(0.09)
    assert bench.kinds == [actions.ReportRoom, actions.Nak, actions.CountReturned, actions.ShrinkCredits]
    assert bench.one(actions.Nak).delivery is second
    bench.arrive()
    assert actions.Nak in bench.kinds
    bench.result(first)
    bench.tick()
    assert bench.kinds == [actions.ReportRoom]
    assert bench.capacity.backlog.is_short


@pytest.mark.parametrize("prepare", [preparing, checking_caller, checking_record, running, stopping, lost])
def test_the_ack_deadline_is_extended_every_two_seconds_in_each_state(prepare: Callable[[Bench], Attempt]) -> None:
    bench = Bench()
    bench.worker()
    attempt = prepare(bench)
    touches = []
    for _ in range(45):
        bench.tick()
        touches += [bench.monotonic - START] * len(bench.all(actions.Touch))
    assert len(touches) == 2
    assert all(abs(touch - due) <= 0.1 + 1e-9 for touch, due in zip(touches, (2.0, 4.0), strict=True))
    assert attempt.touched_at > START + 3.9


def test_the_ack_deadline_of_a_call_that_waits_for_a_turn_is_extended() -> None:
    bench = shared_by_time()
    attempt = waiting(bench)
    bench.tick(TOUCH_EVERY_S)
    assert bench.one(actions.Touch).delivery is attempt.delivery


def test_the_counters_count_starts_ends_failures_and_seconds() -> None:
    bench = Bench(concurrency=3)
    worker = bench.worker(gpus_charged=1.0)
    first, second, _ = bench.start(), bench.start(), bench.start()
    bench.wait(3.0)
    bench.result(first, run_s=3.0)
    bench.result(second, OutcomeKind.RAISED, RAISED, run_s=2.0)
    bench.lose(worker)
    bench.handle(events.WorkerExited("w-1", KILLED))
    machine = bench.machine
    assert (machine.started, machine.ended, machine.failed, machine.run_seconds) == (3, 3, 2, 5.0)
    assert machine.gpu_seconds == pytest.approx(3.0)


def test_the_machine_needs_ticks_while_attempts_depend_on_the_time(bench: Bench) -> None:
    assert not bench.machine.is_busy
    attempt = preparing(bench)
    assert bench.machine.is_busy
    bench.handle(events.ArgumentsReady(attempt, "args"))
    assert bench.machine.is_busy
    bench.result(attempt)
    assert not bench.machine.is_busy


# --- closed -----------------------------------------------------------------------------------------------------------


def test_a_closed_machine_returns_its_backlog_and_awaits_no_exits() -> None:
    bench = Bench()
    bench.make_calls_short()
    bench.worker("w-1")
    bench.worker("w-2")
    lost_attempt = bench.start()
    bench.start()
    waits = [bench.arrive(), bench.arrive()]
    bench.lose(bench.capacity.links["w-1"])
    bench.handle(events.Closed())
    one_call = [actions.Nak, actions.CountReturned]
    assert bench.kinds == [actions.StopAwaiting, *one_call, *one_call, actions.ReportRoom]
    assert [action.delivery for action in bench.all(actions.Nak)] == waits
    assert not bench.machine.awaits_exits
    assert bench.handle(events.WorkerExited("w-1", KILLED)) == [], "NATS redelivers the call"
    assert lost_attempt.state is AttemptState.LOST


def test_a_lookup_that_is_answered_after_the_close_returns_the_call(bench: Bench) -> None:
    attempt = checking_caller(bench)
    bench.capacity.links["w-1"].state = WorkerState.STOPPED
    bench.handle(events.Closed())
    bench.handle(events.CallerChecked(attempt, is_waited_for=True))
    assert bench.kinds == [actions.Release, actions.Nak]
