"""Waits of a call that has a slot: for its arguments, a turn on the GPU, or a lookup. Tests inject the time."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.domain.invocation import InvocationState, Outcome, OutcomeKind, StartReason
from gpufn_core.domain.worker import WorkerState
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import AttemptState
from gpufn_runtime.runner.core.machine import ACK_WAIT_S
from tests.runtime.runner.core.bench import Bench, message_of
from tests.runtime.runner.core.states import (
    LATER,
    NEVER,
    REFERENCE,
    checking_caller,
    checking_record,
    note_of,
    preparing,
    record_of,
    shared_by_time,
    waiting,
)

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
def test_a_call_whose_worker_ended_before_its_arguments_are_ready_returns(bench: Bench, state: WorkerState) -> None:
    attempt = preparing(bench)
    bench.capacity.workers["w-1"].state = state
    bench.handle(events.ArgumentsReady(attempt, "args"))
    assert bench.kinds == [actions.DropBody, actions.Release, actions.Nak]
    assert attempt.state is AttemptState.ENDED


@pytest.mark.parametrize("state", [WorkerState.READY, WorkerState.PARKING, WorkerState.DRAINING])
def test_a_call_that_got_its_slot_before_its_worker_drains_or_parks_begins(bench: Bench, state: WorkerState) -> None:
    attempt = preparing(bench)
    bench.capacity.workers["w-1"].state = state
    bench.handle(events.ArgumentsReady(attempt, "args"))
    assert actions.SendRun in bench.kinds


def test_a_call_whose_arguments_are_lost_ends(bench: Bench) -> None:
    attempt = preparing(bench)
    bench.handle(events.ArgumentsFailed(attempt, LATER, is_lost=True))
    assert bench.one(actions.Refuse).outcome == Outcome(OutcomeKind.LOST, LATER)
    assert bench.kinds[-1] is actions.SlotChanged
    assert bench.capacity.free == 1


def test_a_call_whose_arguments_cannot_be_fetched_now_returns_for_a_second(bench: Bench) -> None:
    attempt = preparing(bench)
    bench.handle(events.ArgumentsFailed(attempt, LATER, is_lost=False))
    assert bench.kinds == [actions.Release, actions.Nak, actions.SlotChanged]
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
    assert bench.capacity.workers["w-1"].slots.in_use == 0


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
    assert [action.attempt.is_repeated for action in bench.all(actions.CheckRecord)] == checks


@pytest.mark.parametrize(
    ("delivery", "checks"),
    [
        ({}, []),
        ({"delivered": 2}, [True]),
        ({"caller_was_away": True}, [False]),
        ({"caller_was_away": True, "is_direct": True}, []),
    ],
)
def test_the_caller_of_a_call_is_checked_if_it_may_have_left(
    bench: Bench, delivery: dict[str, Any], checks: list[bool]
) -> None:
    bench.arrive(**delivery)
    assert [action.attempt.is_repeated for action in bench.all(actions.CheckCaller)] == checks


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
    bench.capacity.workers["w-1"].state = state
    bench.handle(events.RecordChecked(attempt, **checked))
    assert bench.kinds == [actions.Release, action, actions.SlotChanged]
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


def test_a_call_whose_caller_waits_begins_under_its_next_number(bench: Bench) -> None:
    attempt = checking_caller(bench)
    bench.handle(events.CallerChecked(attempt, is_waited_for=True))
    assert bench.kinds == [actions.SendRun]
    assert bench.one(actions.SendRun).run.number == 2


@pytest.mark.parametrize(("checked", "delay_s"), [({"is_elsewhere": True}, ACK_WAIT_S), ({}, 1.0)])
def test_a_call_is_returned_when_another_runner_or_the_caller_may_have_answered(
    bench: Bench, checked: dict[str, Any], delay_s: float
) -> None:
    bench.handle(events.CallerChecked(checking_caller(bench), **checked))
    assert bench.one(actions.Nak).delay_s == delay_s


@pytest.mark.parametrize("is_submitted", [True, False])
def test_a_call_whose_worker_ended_after_the_lookup_returns(bench: Bench, is_submitted: bool) -> None:
    attempt = checking_record(bench) if is_submitted else checking_caller(bench)
    bench.lose(bench.capacity.workers["w-1"])
    answer = events.RecordChecked(attempt) if is_submitted else events.CallerChecked(attempt, is_waited_for=True)
    bench.handle(answer)
    assert bench.kinds == [actions.Release, actions.Nak]
