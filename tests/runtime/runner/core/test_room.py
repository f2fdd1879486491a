"""Room for calls: credits, the backlog, the fast path, the end of the queue. Time is passed in; nothing waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import WorkerState
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import Attempt, AttemptState
from gpufn_runtime.runner.core.step import TOUCH_EVERY_S
from tests.runtime.runner.core.bench import NOW, RAISED, START, Bench, message_of
from tests.runtime.runner.core.states import (
    KILLED,
    checking_caller,
    checking_record,
    lost,
    preparing,
    running,
    shared_by_time,
    stopping,
    waiting,
)

# --- room -------------------------------------------------------------------------------------------------------------


def test_a_ready_worker_makes_room() -> None:
    bench = Bench()
    bench.worker()
    assert bench.kinds == [actions.ReportLimit, actions.OfferCredits]


def test_less_room_withdraws_credits_and_returns_the_backlog(bench: Bench) -> None:
    bench.make_calls_short()
    bench.start()
    bench.arrive()
    bench.capacity.workers["w-1"].state = WorkerState.DRAINING
    bench.handle(events.CapacityDecreased())
    assert bench.kinds == [actions.ShrinkCredits, actions.ReportLimit, actions.Nak, actions.CountReturned]
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
    assert bench.kinds == [actions.ReportLimit, actions.Nak, actions.CountReturned, actions.ShrinkCredits]
    assert bench.one(actions.Nak).delivery is second
    bench.arrive()
    assert actions.Nak in bench.kinds
    bench.result(first)
    bench.tick()
    assert bench.kinds == [actions.ReportLimit]
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
    totals = bench.machine.totals
    assert (totals.started, totals.ended, totals.failed, totals.run_seconds) == (
        3,
        3,
        2,
        5.0,
    )
    assert totals.gpu_seconds == pytest.approx(3.0)


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
    bench.lose(bench.capacity.workers["w-1"])
    bench.handle(events.Closed())
    one_call = [actions.Nak, actions.CountReturned]
    assert bench.kinds == [actions.StopAwaiting, *one_call, *one_call, actions.ReportLimit]
    assert [action.delivery for action in bench.all(actions.Nak)] == waits
    assert not bench.machine.awaits_exits
    assert bench.handle(events.WorkerExited("w-1", KILLED)) == [], "NATS redelivers the call"
    assert lost_attempt.state is AttemptState.LOST


def test_a_lookup_that_is_answered_after_the_close_returns_the_call(bench: Bench) -> None:
    attempt = checking_caller(bench)
    bench.capacity.workers["w-1"].state = WorkerState.STOPPED
    bench.handle(events.Closed())
    bench.handle(events.CallerChecked(attempt, is_waited_for=True))
    assert bench.kinds == [actions.Release, actions.Nak]
