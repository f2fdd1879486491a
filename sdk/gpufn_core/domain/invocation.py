"""The life of an invocation: its states, and the outcomes of an attempt.

QUEUED → RUNNING → SUCCEEDED | FAILED | CANCELLED | TIMED_OUT
RUNNING → QUEUED on a retry;   QUEUED → CANCELLED | EXPIRED
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from gpufn_core.errors import ErrorInfo, InvocationCancelled, InvocationExpired

STOPS_WITHIN_S: Final = 1.0  # an attempt after its timeout may take this long to end
# A runner ends a call at its deadline and reports that; a waiting caller allows this much longer for the report.
END_REPORT_WITHIN_S: Final = STOPS_WITHIN_S + 1.0
DELIVERIES_ON_FAILED_GPUS: Final = 3  # limit per invocation, which may itself make GPUs fail


class InvocationState(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    EXPIRED = "expired"

    @property
    def ended(self) -> bool:
        return self not in (InvocationState.QUEUED, InvocationState.RUNNING)

    @property
    def leaves_dead_letter(self) -> bool:
        """Whether a submitted invocation that ended in this state can be replayed."""
        return self in (InvocationState.FAILED, InvocationState.TIMED_OUT, InvocationState.EXPIRED)


class OutcomeKind(enum.StrEnum):
    """How an Attempt ended."""

    SUCCEEDED = "succeeded"
    RAISED = "raised"  # the user's code raised, or its return value cannot be encoded
    REJECTED = "rejected"  # the input is invalid; the user's code was not called
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # the deadline passed before it started
    LOST = "lost"  # the worker died, or NATS was unavailable for a call that the function made
    NOT_STARTED = "not_started"  # no worker of this function can start


class StartReason(enum.StrEnum):
    """The reason why user code was started for an attempt."""

    FIRST = "first"
    RAISED = "raised"  # a retry: the previous attempt raised
    TIMED_OUT = "timed_out"  # a retry: the previous attempt timed out
    WORKER_LOST = "worker_lost"  # a retry: the worker of the previous attempt died
    DEVICE_FAILED = "device_failed"  # the GPU failed during the previous attempt
    STOPPED = "stopped"  # the node or the platform stopped during the previous attempt
    RUNNER_LOST = "runner_lost"  # the runner or node of the previous delivery died or was silent for too long


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    kind: OutcomeKind
    error: ErrorInfo | None = None


_STATES: dict[OutcomeKind, InvocationState] = {
    OutcomeKind.SUCCEEDED: InvocationState.SUCCEEDED,
    OutcomeKind.RAISED: InvocationState.FAILED,
    OutcomeKind.REJECTED: InvocationState.FAILED,
    OutcomeKind.TIMED_OUT: InvocationState.TIMED_OUT,
    OutcomeKind.CANCELLED: InvocationState.CANCELLED,
    OutcomeKind.EXPIRED: InvocationState.EXPIRED,
    OutcomeKind.LOST: InvocationState.FAILED,
    OutcomeKind.NOT_STARTED: InvocationState.FAILED,
}


def state_after(kind: OutcomeKind) -> InvocationState:
    return _STATES[kind]


def queue_timeout_error(waited_s: float) -> InvocationExpired:
    """Return the error of an invocation that expired in the queue."""
    return InvocationExpired(f"the call waited in the queue for too long ({waited_s:.1f} s)")


def deleted_error(what: str) -> InvocationCancelled:
    """Return the error of an invocation whose function or revision was deleted."""
    return InvocationCancelled(f"{what} was deleted before this call started.")
