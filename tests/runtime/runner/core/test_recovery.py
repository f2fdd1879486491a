"""Attempts of lost workers and of earlier runners. Time is passed in; nothing waits."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind, StartReason
from gpufn_core.domain.retry_policy import Settlement
from gpufn_core.domain.worker import Exit, WorkerState
from gpufn_core.errors import DeviceFailed, PlatformStopping, WorkerLost
from gpufn_core.protocol.frames import Unfinished
from gpufn_core.spec.function_spec import Batch, CallKind, Retry
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import AttemptState
from gpufn_runtime.runner.core.step import TOUCH_EVERY_S
from tests.runtime.runner.core.bench import NOW, START, Bench, FakeDelivery, FakeWorker, message_of
from tests.runtime.runner.core.states import (
    KILLED,
    lost,
)

# --- lost workers -----------------------------------------------------------------------------------------------------


def test_the_calls_of_a_lost_worker_are_kept_until_its_exit_is_reported() -> None:
    bench = Bench(concurrency=2)
    worker = bench.worker()
    first, second = bench.start(), bench.start()
    bench.lose(worker)
    assert bench.one(actions.AwaitExit).worker_id == "w-1"
    assert [first.state, second.state] == [AttemptState.LOST] * 2
    assert (bench.machine.is_busy, bench.machine.awaits_exits) == (True, True)
    bench.tick(TOUCH_EVERY_S)
    assert [action.delivery for action in bench.all(actions.Touch)] == [first.delivery, second.delivery]
    assert list(bench.machine.attempts()) == [first, second]
    bench.handle(events.WorkerExited("w-1", KILLED))
    assert bench.one(actions.StopAwaiting).worker_id == "w-1"
    errors = [action.outcome.error for action in bench.all(actions.Settle)]
    assert [error is not None and "SIGKILL" in error.message for error in errors] == [True, True]
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
    bench.lose(bench.capacity.workers["w-1"])
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
    assert "code 3" in error.message
    assert error.message.endswith("\nSegmentation fault")


def test_a_lost_call_is_charged_until_its_worker_was_lost(bench: Bench) -> None:
    bench.start()
    bench.wait(2.0)
    bench.lose(bench.capacity.workers["w-1"])
    bench.wait(5.0)
    bench.handle(events.WorkerExited("w-1", KILLED))
    assert (bench.one(actions.Settle).charged_s, bench.one(actions.Settle).run_s) == (2.0, 2.0)


def test_a_worker_without_calls_needs_no_report(bench: Bench) -> None:
    assert bench.lose(bench.capacity.workers["w-1"]) == []
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
    assert bench.one(actions.StopAwaiting).worker_id == "w-1"
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
def test_a_missing_report_is_not_awaited_forever(bench: Bench, seconds: float, is_over: bool) -> None:
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
    assert [action.charged_s for action in bench.all(actions.Settle)] == [1.0, 1.0]


# --- adoption ---------------------------------------------------------------------------------------------------------


def returned(bench: Bench, **fields: Any) -> tuple[FakeWorker, Unfinished]:
    """A worker of an earlier runner that comes back with one attempt, which has a slot."""
    worker = FakeWorker("w-2", bench.revision, **({"state": WorkerState.STARTING} | fields))
    bench.capacity.workers["w-2"] = worker
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
    assert (worker.slots.in_use, bench.machine.totals.started) == (1, 1)


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


def test_an_attempt_of_a_worker_that_has_ended_again_is_ignored(bench: Bench) -> None:
    worker, unfinished = returned(bench, state=WorkerState.FAILED)
    assert bench.handle(events.UnfinishedFound(worker, unfinished, FakeDelivery(), message_of(), counted=1)) == []


def test_a_worker_that_claims_an_impossible_run_time_is_limited(bench: Bench) -> None:
    worker, unfinished = returned(bench)
    claimed = Unfinished(unfinished.attempt, unfinished.invocation, unfinished.delivery, 1e9, 1)
    bench.handle(events.UnfinishedFound(worker, claimed, FakeDelivery(), message_of(), counted=1))
    assert bench.one(actions.Adopt).attempt.run.began == START - 1.0, "it was submitted 1 s ago"


def test_a_slot_that_an_earlier_runner_had_used_is_offered(bench: Bench) -> None:
    worker = bench.capacity.workers["w-1"]
    bench.handle(events.SlotFreed(worker, "r"))
    assert bench.kinds == [actions.DropBody, actions.SlotChanged]
    bench.handle(events.SlotFreed(worker))
    assert bench.kinds == [actions.SlotChanged]
