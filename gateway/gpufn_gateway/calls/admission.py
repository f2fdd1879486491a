"""Admission control: whether a call may join its function's queue, and when a rejected call should be retried. Pure."""

from __future__ import annotations

from gpufn_core.domain.circuit_errors import start_failure
from gpufn_core.domain.revision import Function, Revision
from gpufn_core.errors import CapacityError, GpufnError, InvocationExpired, NoCapacity, PayloadTooLarge, QueueFull
from gpufn_core.protocol.reports import FunctionStatus, WaitReason, WorkerCounts
from gpufn_core.spec.units import format_bytes

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 120.0
_NEW_WORKER_S = 1.0  # freeing capacity and starting a worker takes at least this long


def refusal(
    function: Function, revision: Revision, status: FunctionStatus | None, timeout_s: float | None = None
) -> GpufnError | None:
    """Return the error for a call of `revision` that cannot be served in time; None if it may be queued.

    `status` None means unknown: the call is queued then. `timeout_s` is the client's timeout, if it sent one.
    """
    if is_switched_off(function, revision):
        return CapacityError(
            f"{function.name} has max_workers=0: allow workers (`gpufn scale {function.name} --max 1`), "
            "or submit the call to run later."
        )
    if status is None:
        return None
    return start_failure(revision.number, status) or _no_capacity(revision, status, timeout_s)


def is_switched_off(function: Function, revision: Revision) -> bool:
    max_workers = revision.spec.scaling.max_workers if function.max_workers is None else function.max_workers
    return max_workers == 0


def _no_capacity(revision: Revision, status: FunctionStatus, timeout_s: float | None) -> NoCapacity | None:
    """Reject a call with a short timeout if no worker can start: capacity is not freed and used within that time."""
    if timeout_s is None or timeout_s >= _NEW_WORKER_S or status.waiting is None or status.workers != WorkerCounts():
        return None
    if status.serving != revision.number or status.waiting.reason is not WaitReason.NO_CAPACITY:
        return None
    return NoCapacity(
        f"{revision.function} has no worker, and there is no room for one: {status.waiting.detail}",
        retry_after_s=retry_after_s(revision, status),
    )


def explain_expiry(function: str, error: InvocationExpired, status: FunctionStatus | None) -> InvocationExpired:
    """Add to `error` why the call waited, if that is known."""
    if status is None or status.waiting is None:
        return error
    return InvocationExpired(f"{error.message}: {function} waits, {status.waiting.detail}")


def too_large(what: str, limit_bytes: int, size: int | None = None) -> PayloadTooLarge:
    """Build the error for a body above its limit. `what` names the kind of body, `size` its bytes if known."""
    problem = "is too large" if size is None else f"has {size:,} bytes"
    return PayloadTooLarge(f"The body {problem}: the limit for {what} is {format_bytes(limit_bytes)}.")


def queue_full(revision: Revision, status: FunctionStatus | None) -> QueueFull:
    return QueueFull(
        f"The queue of {revision.function} is full; retry later.", retry_after_s=retry_after_s(revision, status)
    )


def retry_after_s(revision: Revision, status: FunctionStatus | None) -> float:
    """Estimate when half of the queue will have been served, from its depth, the workers and the service time.

    Half, so that the queue does not run empty before the rejected callers retry.
    """
    if status is None or status.queued is None:
        return 5.0
    slots = max(1, status.workers.ready or status.wanted) * revision.spec.parallel_calls
    service_s = status.service_s if status.service_s is not None else 1.0
    wait_s = status.queued / 2 * service_s / slots
    if not status.workers.ready:
        wait_s += status.cold_start_s or 0.0
    return min(max(wait_s, _MIN_RETRY_S), _MAX_RETRY_S)
