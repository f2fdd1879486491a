"""A run: its start, its notes, its result and its charge. Time is passed in; nothing waits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpufn_core.domain.invocation import Outcome, OutcomeKind, StartReason
from gpufn_core.domain.retry_policy import Settlement
from gpufn_core.domain.worker import ColdStart
from gpufn_core.errors import DeviceFailed, ResultNotEncodable
from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW
from gpufn_core.spec.function_spec import Batch, CallKind, Retry
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import AttemptState
from gpufn_runtime.runner.core.machine import NOTED_AFTER_S
from tests.runtime.runner.core.bench import NOW, RAISED, Bench, message_of
from tests.runtime.runner.core.states import (
    stopping,
)

# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_frame_has_all_data_for_the_worker(bench: Bench) -> None:
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
        actions.Release, actions.Settle, actions.SlotChanged,
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


def test_an_attempt_whose_gpu_failed_is_handed_back_and_not_charged(bench: Bench) -> None:
    attempt = bench.start()
    bench.result(attempt, OutcomeKind.LOST, DeviceFailed("broken").info())
    handed_back = bench.one(actions.HandBack)
    assert (handed_back.attempt, handed_back.reason, handed_back.message) == (
        attempt, StartReason.DEVICE_FAILED, "broken",
    )  # fmt: skip
    assert actions.Settle not in bench.kinds


def test_a_large_result_is_collected_before_it_is_settled(bench: Bench) -> None:
    attempt = bench.start()
    bench.result(attempt, shared_body="r")
    assert actions.Settle not in bench.kinds
    collected = bench.one(actions.CollectResult)
    assert bench.kinds[-1] is actions.SlotChanged
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
    assert bench.kinds == [actions.LogFailure, actions.Settle]
    assert bench.machine.totals.failed == 1


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
    assert (bench.one(actions.Settle).run_s, bench.one(actions.Settle).charged_s) == (2.0, 2.0)
    assert attempt.run.busy_s == 2.0


def test_a_call_of_a_batch_is_charged_its_share() -> None:
    bench = Bench(batch=Batch(max_size=4))
    bench.worker()
    attempt = bench.start()
    bench.wait(2.0)
    bench.result(attempt, run_s=1.5, charged_s=0.5)
    settled = bench.one(actions.Settle)
    assert (settled.run_s, settled.gather_s, bench.one(actions.Settle).charged_s) == (1.5, 0.5, 0.5)
    assert bench.machine.totals.batches == {4: 1}  # of three calls


def test_only_gathered_calls_have_a_size_of_their_batch(bench: Bench) -> None:
    attempt = bench.start()
    bench.wait(2.0)
    bench.result(attempt, run_s=1.5, charged_s=0.5)
    assert bench.machine.totals.batches == {}


def test_two_concurrent_calls_share_the_gpu_seconds() -> None:
    bench = Bench(concurrency=2)
    bench.worker(gpus_charged=0.5)
    first, second = bench.start(), bench.start()
    bench.wait(2.0)
    bench.result(first, run_s=2.0)
    bench.wait(1.0)
    bench.result(second, run_s=3.0)
    assert (first.gpu_s, second.gpu_s, bench.machine.totals.gpu_seconds) == (0.5, 1.0, 1.5)


def test_errors_are_calls_that_failed_and_durations_are_counted_on_request(bench: Bench) -> None:
    machine = bench.machine
    bench.result(bench.start())
    assert machine.totals.durations == {}
    machine.totals.counts_durations = True
    for kind in (OutcomeKind.SUCCEEDED, OutcomeKind.RAISED, OutcomeKind.CANCELLED):
        bench.result(bench.start(), kind, None if kind is OutcomeKind.SUCCEEDED else RAISED, run_s=0.5)
    assert (machine.totals.ended, machine.totals.failed, machine.totals.errors) == (4, 2, 1)
    assert sum(machine.totals.durations.values()) == 3
