"""Attempts that the runner stops: timeouts, cancels, withdrawn calls. Time is passed in; nothing waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpufn_core.domain.invocation import Outcome, OutcomeKind
from gpufn_core.errors import InvocationCancelled
from gpufn_core.spec.function_spec import CallKind
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import Attempt, AttemptState
from tests.runtime.runner.core.bench import NOW, START, Bench, FakeDelivery, message_of
from tests.runtime.runner.core.states import (
    NEVER,
    checking_caller,
    checking_record,
    lost,
    preparing,
    shared_by_time,
    stopping,
    waiting,
)


def test_a_sync_function_that_times_out_is_ended_at_once() -> None:
    """It cannot be interrupted: its slot is poisoned, and its worker ends."""
    bench = Bench(timeout_s=3.0)
    worker = bench.worker()
    attempt = bench.start()
    bench.tick(2.9)
    assert attempt.state is AttemptState.RUNNING
    bench.tick(0.1)
    assert bench.kinds[:3] == [actions.SendStop, actions.RevokeTurns, actions.Release]
    assert bench.one(actions.Settle).outcome.kind is OutcomeKind.TIMED_OUT
    assert (worker.slots.poisoned, bench.capacity.free, bench.machine.totals.failed) == (1, 0, 1)


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
        actions.Release, actions.Refuse, actions.OfferCredits, actions.SlotChanged,
    ]  # fmt: skip
    assert bench.one(actions.Refuse).outcome.kind is OutcomeKind.CANCELLED


def test_a_cancelled_run_has_five_seconds_to_stop(bench: Bench) -> None:
    attempt = stopping(bench)
    assert (bench.kinds, attempt.is_cancelled) == ([actions.SendStop], True)
    bench.tick(4.9)
    assert attempt.state is AttemptState.STOPPING
    bench.tick(0.1)
    assert bench.one(actions.Settle).outcome.kind is OutcomeKind.CANCELLED
    assert bench.capacity.workers["w-1"].slots.poisoned == 1


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


def test_a_poisoned_slot_accepts_no_call_and_neither_does_its_worker() -> None:
    bench = Bench(concurrency=2, timeout_s=1.0)
    worker = bench.worker()
    bench.start()
    bench.wait(0.5)
    second = bench.start()
    bench.tick(0.5)
    settled_at = bench.kinds.index(actions.Settle)
    assert bench.kinds[settled_at + 1 :][:2] == [actions.ShrinkCredits, actions.SlotChanged]
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
