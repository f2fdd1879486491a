"""An Invocation's life: its states, how an Attempt ends, and what that end means for the Delivery.

QUEUED → RUNNING → SUCCEEDED | FAILED | CANCELLED | TIMED_OUT
RUNNING → QUEUED on a retry;   QUEUED → CANCELLED | EXPIRED
"""

from __future__ import annotations

import enum
import math
from typing import Final

import msgspec

from gpufn_core.errors import ErrorInfo, InvocationCancelled, InvocationExpired
from gpufn_core.spec.function_spec import Retry

STOPS_WITHIN_S: Final = 1.0  # so long an Attempt that is out of time may take to end by itself
# A runner ends a call at its deadline and says so; who waits for its word does so this much longer.
WORD_WITHIN_S: Final = STOPS_WITHIN_S + 1.0
DELIVERIES_ON_FAILED_GPUS: Final = 3  # of one Invocation: it may be what makes GPUs fail


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
        """Whether somebody may want to run a submitted invocation again that ended so."""
        return self in (InvocationState.FAILED, InvocationState.TIMED_OUT, InvocationState.EXPIRED)


class OutcomeKind(enum.StrEnum):
    """How an Attempt ended."""

    SUCCEEDED = "succeeded"
    RAISED = "raised"  # the user's code raised, or returned what cannot be encoded
    REJECTED = "rejected"  # the input does not fit; the user's code was not reached
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # the deadline had passed before it started
    LOST = "lost"  # the worker died, or the bus was away for a call that the function made
    NOT_STARTED = "not_started"  # no worker of this function can start


class StartReason(enum.StrEnum):
    """Why user code was started for an Attempt."""

    FIRST = "first"
    RAISED = "raised"  # the attempt before raised, and the function has retries
    TIMED_OUT = "timed_out"  # the same of one that ran for too long
    WORKER_LOST = "worker_lost"  # the same of one whose worker died
    DEVICE_FAILED = "device_failed"  # the GPU failed under the attempt before
    STOPPED = "stopped"  # the node or the platform stopped while the attempt before ran
    RUNNER_LOST = "runner_lost"  # the runner or the node of the delivery before died, or was silent for too long


class Settlement(enum.StrEnum):
    """What a Runner tells the bus about a Delivery. A retry is a new message, so that its attempt is counted."""

    ACK = "ack"
    RETRY = "retry"


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
_WORTH_A_RETRY = frozenset({OutcomeKind.RAISED, OutcomeKind.TIMED_OUT, OutcomeKind.LOST})


def state_after(kind: OutcomeKind) -> InvocationState:
    return _STATES[kind]


def settlement_for(outcome: Outcome, retries: Retry | None, retried: int, *, left_s: float = math.inf) -> Settlement:
    """The one table from Outcome to Settlement.

    The policy has been used `retried` times; starts that a fault of the platform repeated are not counted. No retry
    starts at the deadline or later, which is in `left_s`: it would expire in the queue, and hide how this one ended.
    """
    if outcome.kind not in _WORTH_A_RETRY or retries is None or retried >= retries.attempts:
        return Settlement.ACK
    if retries.delay_before(retried + 2) >= left_s:
        return Settlement.ACK
    if outcome.kind is OutcomeKind.RAISED and retries.on:
        raised = outcome.error.error_bases if outcome.error else ()
        if not set(raised) & set(retries.on):
            return Settlement.ACK
    return Settlement.RETRY


def waited_too_long(waited_s: float) -> InvocationExpired:
    """What is told of an Invocation that expired in the queue, by whoever finds it there."""
    return InvocationExpired(f"{waited_s:.1f} s in the queue were too long")


def was_deleted(what: str) -> InvocationCancelled:
    """The same of one whose Function, or Revision, has gone."""
    return InvocationCancelled(f"{what} was deleted before this call started.")
