"""The table that decides whether a call runs again after an attempt of it has ended."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.domain.invocation import DELIVERIES_ON_FAILED_GPUS, Outcome, OutcomeKind, StartReason
from gpufn_core.domain.retry_policy import Settlement
from gpufn_core.errors import DeviceFailed, ErrorInfo, InvocationTimedOut, PlatformStopping, WorkerLost
from gpufn_core.spec.function_spec import Retry
from gpufn_runtime.runner.core.attempt import Attempt, AttemptState, Execution
from gpufn_runtime.runner.core.end_rules import SETTLEMENTS, Ending, ending_of, hand_back_reason
from tests.runtime.runner.core.bench import NOW, RAISED, FakeDelivery, FakeWorker, message_of, revision_of

SUCCEEDED = Outcome(OutcomeKind.SUCCEEDED)
RAISED_OSERROR = Outcome(OutcomeKind.RAISED, RAISED)
RAISED_OTHER = Outcome(OutcomeKind.RAISED, ErrorInfo("function_raised", "no", error_bases=("KeyError",)))
TIMED_OUT = Outcome(OutcomeKind.TIMED_OUT, InvocationTimedOut().info())
LOST = Outcome(OutcomeKind.LOST, WorkerLost().info())
GPU_FAILED = Outcome(OutcomeKind.LOST, DeviceFailed().info())
NODE_STOPS = Outcome(OutcomeKind.LOST, PlatformStopping().info())
CANCELLED = Outcome(OutcomeKind.CANCELLED)
REJECTED = Outcome(OutcomeKind.REJECTED)
FINAL = [SUCCEEDED, CANCELLED, REJECTED]
FAILURES = [RAISED_OSERROR, TIMED_OUT, LOST]
TWICE = Retry(2, delay_s=1.0)


def ended(*, items: int = 0, delivered: int = 1, retries: Retry | None = None, **message: Any) -> Attempt:
    """An attempt that has ended. `message` are fields of its message."""
    revision = revision_of(retries=retries)
    delivery, worker = FakeDelivery(delivered=delivered), FakeWorker("w-1", revision)
    run = Execution(started_at=NOW, began=0.0, must_end_at=1.0, is_cold=False, busy_from=None, items=items)
    return Attempt(
        1, delivery, message_of(**message), revision.spec.methods[0], worker,
        touched_at=0.0, state=AttemptState.ENDED, begun=run,
    )  # fmt: skip


@pytest.mark.parametrize("outcome", [*FINAL, *FAILURES, GPU_FAILED, NODE_STOPS])
def test_a_call_whose_reader_has_seen_items_ends(outcome: Outcome) -> None:
    assert ending_of(ended(items=1, retries=TWICE), outcome, NOW) is Ending.END


@pytest.mark.parametrize("delivered", range(1, DELIVERIES_ON_FAILED_GPUS))
def test_a_call_whose_gpu_failed_runs_on_another_one(delivered: int) -> None:
    assert ending_of(ended(delivered=delivered), GPU_FAILED, NOW) is Ending.HAND_BACK


@pytest.mark.parametrize(("retries", "ending"), [(None, Ending.END), (TWICE, Ending.RETRY)])
def test_a_call_that_was_on_too_many_failed_gpus_may_cause_the_failures(retries: Retry | None, ending: Ending) -> None:
    attempt = ended(delivered=DELIVERIES_ON_FAILED_GPUS, retries=retries)
    assert ending_of(attempt, GPU_FAILED, NOW) is ending


@pytest.mark.parametrize("delivered", [1, 3, 50])
def test_a_call_whose_node_stops_runs_again_without_a_limit(delivered: int) -> None:
    assert ending_of(ended(delivered=delivered), NODE_STOPS, NOW) is Ending.HAND_BACK


@pytest.mark.parametrize("outcome", FAILURES)
def test_a_failure_is_retried_by_the_policy(outcome: Outcome) -> None:
    assert ending_of(ended(retries=TWICE), outcome, NOW) is Ending.RETRY


@pytest.mark.parametrize("outcome", FAILURES)
def test_a_failure_without_a_policy_ends(outcome: Outcome) -> None:
    assert ending_of(ended(), outcome, NOW) is Ending.END


@pytest.mark.parametrize("outcome", FINAL)
def test_an_outcome_that_is_not_worth_a_retry_ends(outcome: Outcome) -> None:
    assert ending_of(ended(retries=TWICE), outcome, NOW) is Ending.END


@pytest.mark.parametrize(("retried", "ending"), [(0, Ending.RETRY), (1, Ending.RETRY), (2, Ending.END)])
def test_the_policy_is_used_up(retried: int, ending: Ending) -> None:
    assert ending_of(ended(retries=TWICE, attempt=9, retried=retried), LOST, NOW) is ending


@pytest.mark.parametrize(("outcome", "ending"), [(RAISED_OSERROR, Ending.RETRY), (RAISED_OTHER, Ending.END)])
def test_a_policy_may_name_the_exceptions(outcome: Outcome, ending: Ending) -> None:
    assert ending_of(ended(retries=Retry(2, on=(OSError,))), outcome, NOW) is ending


@pytest.mark.parametrize(("remaining_s", "ending"), [(1.5, Ending.RETRY), (1.0, Ending.END), (-1.0, Ending.END)])
def test_no_retry_starts_after_the_deadline(remaining_s: float, ending: Ending) -> None:
    """Its delay is 1 s."""
    assert ending_of(ended(retries=TWICE, deadline=NOW + remaining_s), LOST, NOW) is ending


def test_an_interruption_uses_up_no_retry() -> None:
    attempt = ended(retries=TWICE, attempt=3, retried=2, deadline=NOW - 1)
    assert ending_of(attempt, GPU_FAILED, NOW) is Ending.HAND_BACK


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (GPU_FAILED, StartReason.DEVICE_FAILED),
        (NODE_STOPS, StartReason.STOPPED),
        (LOST, None),
        (RAISED_OSERROR, None),
        (SUCCEEDED, None),
    ],
)
def test_only_the_platform_interrupts(outcome: Outcome, reason: StartReason | None) -> None:
    assert hand_back_reason(outcome) is reason


def test_a_retry_and_an_end_have_a_settlement() -> None:
    assert SETTLEMENTS == {Ending.RETRY: Settlement.RETRY, Ending.END: Settlement.ACK}
