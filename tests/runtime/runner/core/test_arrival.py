"""Arrivals: a call gets a slot, waits in the backlog, returns to its queue, or is refused. Time is passed in."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind, StartReason
from gpufn_core.domain.worker import WorkerState
from gpufn_core.spec.function_spec import Retry
from gpufn_runtime.runner.core import actions
from gpufn_runtime.runner.core.attempt import AttemptState
from tests.runtime.runner.core.bench import NOW, Bench, message_of


def test_a_call_begins_in_a_free_slot(bench: Bench) -> None:
    delivery = bench.arrive(body=b"[1]")
    sent = bench.one(actions.SendRun)
    assert bench.kinds == [actions.SendRun]
    assert (sent.attempt.delivery, sent.attempt.state, sent.body) == (delivery, AttemptState.RUNNING, b"[1]")
    assert bench.capacity.workers["w-1"].attempts == {1: sent.attempt}
    assert (bench.capacity.free, bench.capacity.workers["w-1"].idle_since) == (0, None)


def test_a_worker_that_begins_its_last_call_is_to_be_replaced() -> None:
    bench = Bench(max_calls=2)
    bench.worker()
    bench.result(bench.start())
    assert actions.WorkerSpent not in bench.kinds
    bench.start()
    assert bench.kinds == [actions.SendRun, actions.WorkerSpent]


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


def test_a_short_call_returns_to_its_queue_if_no_worker_accepts_calls() -> None:
    bench = Bench()
    bench.make_calls_short()
    bench.arrive()
    assert bench.kinds == [actions.Nak, actions.CountReturned]


def test_a_returned_fast_path_call_does_not_wait_in_a_queue(bench: Bench) -> None:
    bench.start()
    bench.arrive(is_direct=True)
    assert bench.kinds == [actions.Nak]


def test_only_a_call_from_the_queue_may_exceed_the_room(bench: Bench) -> None:
    bench.make_calls_short()
    bench.start()
    while bench.capacity.room() > 0:
        bench.arrive(is_direct=True)
        assert bench.actions == []
    bench.arrive(is_direct=True)
    assert bench.kinds == [actions.Nak]
    bench.arrive()
    assert bench.actions == []


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


def test_a_call_is_sent_to_the_worker_with_the_most_free_slots() -> None:
    bench = Bench(concurrency=2)
    bench.worker("w-1")
    bench.worker("w-2")
    assert [bench.start().worker.id for _ in range(4)] == ["w-1", "w-2", "w-1", "w-2"]


def test_a_worker_that_needs_no_turn_is_preferred() -> None:
    bench = Bench(concurrency=2)
    bench.worker("w-1", gpu="GPU-1", needs_turn=True, must_take_turns=True)
    bench.worker("w-2")
    assert [bench.start().worker.id for _ in range(2)] == ["w-2", "w-2"]


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.DRAINING, WorkerState.PARKING, WorkerState.PARKED])
def test_only_a_ready_worker_accepts_calls(state: WorkerState) -> None:
    bench = Bench()
    bench.worker(state=state)
    bench.arrive()
    assert actions.Nak in bench.kinds


def test_a_later_attempt_has_the_reason_of_its_start(bench: Bench) -> None:
    bench.arrive(message_of(attempt=2))
    assert bench.one(actions.SendRun).attempt.reason is StartReason.RAISED
