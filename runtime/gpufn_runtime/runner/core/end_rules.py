"""The rules that end an attempt: whether the platform repeats the call, and otherwise its retry policy. Pure."""

from __future__ import annotations

import enum
import math
from typing import Final

from gpufn_core.domain.invocation import DELIVERIES_ON_FAILED_GPUS, Outcome, OutcomeKind, StartReason
from gpufn_core.domain.retry_policy import Settlement, settlement_for
from gpufn_core.domain.worker import Exit
from gpufn_core.errors import (
    DeviceFailed,
    GpufnError,
    InvocationCancelled,
    InvocationTimedOut,
    PlatformStopping,
    WorkerLost,
)
from gpufn_runtime.runner.core.attempt import Attempt, Execution, Stop


class Ending(enum.StrEnum):
    """How a call goes on. HAND_BACK: the platform interrupted it; it runs again and uses up no retry. RETRY: its policy
    repeats it. END: the outcome is final."""

    HAND_BACK = "hand back"
    RETRY = "retry"
    END = "end"


HAND_BACK_REASONS: Final = {DeviceFailed.code: StartReason.DEVICE_FAILED, PlatformStopping.code: StartReason.STOPPED}
_SUCCEEDED, _END = OutcomeKind.SUCCEEDED, Ending.END
CANCELLED: Final = Outcome(OutcomeKind.CANCELLED, InvocationCancelled().info())
SETTLEMENTS: Final = {Ending.RETRY: Settlement.RETRY, Ending.END: Settlement.ACK}


def ending_of(attempt: Attempt, outcome: Outcome, now: float) -> Ending:
    """Decide how a call goes on. `now` is in unix seconds.

    | items sent | outcome                                        | ending    |
    |------------|------------------------------------------------|-----------|
    | none       | its GPU failed, fewer than 3 deliveries so far | HAND_BACK |
    | none       | its node stops                                 | HAND_BACK |
    | none       | worth a retry, by `settlement_for`             | RETRY     |
    | some       | any: a reader has seen items                   | END       |
    |            | any other                                      | END       |
    """
    if (outcome.error is None and outcome.kind is _SUCCEEDED) or attempt.run.items:
        return _END
    reason = hand_back_reason(outcome)
    if reason is StartReason.STOPPED:
        return Ending.HAND_BACK
    if reason is StartReason.DEVICE_FAILED and attempt.delivery.delivered < DELIVERIES_ON_FAILED_GPUS:
        return Ending.HAND_BACK
    message = attempt.message
    remaining_s = message.deadline - now if message.deadline else math.inf
    settlement = settlement_for(outcome, attempt.worker.revision.spec.retries, message.retries_used, left_s=remaining_s)
    return Ending.RETRY if settlement is Settlement.RETRY else Ending.END


def outcome_of_stop(run: Execution, stop: Stop, timeout_s: float) -> Outcome:
    """Return the outcome of an attempt that the runner has decided to stop."""
    if stop.kind is OutcomeKind.CANCELLED:
        return CANCELLED
    if run.must_end_at >= run.began + timeout_s:
        why = f"it ran for longer than its timeout of {timeout_s:g} s"
    else:
        why = "it was still running at its caller's deadline"
    return Outcome(OutcomeKind.TIMED_OUT, InvocationTimedOut(why).info())


def worker_exit_error(worker_id: str, exit_: Exit | None) -> GpufnError:
    """Return the error of the calls that ran in a lost worker. `exit_` is None if the agent has not reported it."""
    if exit_ is None:
        return WorkerLost(f"worker {worker_id} closed its connection while it ran this call")
    kind = PlatformStopping if exit_.stopping else DeviceFailed if exit_.device_fault else WorkerLost
    tail = f"\n{exit_.tail}" if exit_.tail else ""
    return kind(f"worker {worker_id} {exit_.describe()} while it ran this call{tail}")


def hand_back_reason(outcome: Outcome) -> StartReason | None:
    """Return why the platform interrupted the attempt; None if it did not."""
    return HAND_BACK_REASONS.get(outcome.error.code) if outcome.error is not None else None
