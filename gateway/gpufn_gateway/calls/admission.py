"""Whether a call may join its function's queue, and when a refused one should come back. Pure."""

from __future__ import annotations

from gpufn_core.domain.circuit_errors import start_failure
from gpufn_core.domain.revision import Function, Revision
from gpufn_core.errors import CapacityError, GpufnError, InvocationExpired, NoCapacity, PayloadTooLarge, QueueFull
from gpufn_core.protocol.reports import FunctionStatus, WaitReason, WorkerCounts

_SHORTEST_RETRY_S = 1.0
_LONGEST_RETRY_S = 120.0
_ROOM_S = 1.0


def refusal(
    function: Function, revision: Revision, status: FunctionStatus | None, timeout_s: float | None = None
) -> GpufnError | None:
    """Why nobody should wait for a call of `revision` now; None when it may queue.

    `status` None means unknown: then the call queues. `timeout_s` is what the client gives it, if it said so.
    """
    if is_switched_off(function, revision):
        return CapacityError(
            f"{function.name} has max_workers=0: allow it workers (`gpufn scale {function.name} --max 1`), "
            "or submit the call to run later."
        )
    if status is None:
        return None
    return start_failure(revision.number, status) or _no_capacity(revision, status, timeout_s)


def is_switched_off(function: Function, revision: Revision) -> bool:
    highest = revision.spec.scaling.max_workers if function.max_workers is None else function.max_workers
    return highest == 0


def _no_capacity(revision: Revision, status: FunctionStatus, timeout_s: float | None) -> NoCapacity | None:
    """Room that is not there now will not be made, and a worker started in it, in so short a time."""
    if timeout_s is None or timeout_s >= _ROOM_S or status.waiting is None or status.workers != WorkerCounts():
        return None
    if status.serving != revision.number or status.waiting.reason is not WaitReason.NO_CAPACITY:
        return None
    return NoCapacity(
        f"{revision.function} has no worker, and there is no room for one: {status.waiting.detail}",
        retry_after_s=retry_after_s(revision, status),
    )


def expired(function: str, error: InvocationExpired, status: FunctionStatus | None) -> InvocationExpired:
    """`error`, and why the call waited, as far as that is known."""
    if status is None or status.waiting is None:
        return error
    return InvocationExpired(f"{error.message}: {function} waits, {status.waiting.detail}")


def too_large(what: str, limit_bytes: int, size: int | None = None) -> PayloadTooLarge:
    """`size` in bytes, when it is known."""
    said = "is larger" if size is None else f"has {size:,} bytes, more"
    return PayloadTooLarge(f"The body {said} than the {_mib(limit_bytes)} that {what} may have here.")


def queue_full(revision: Revision, status: FunctionStatus | None) -> QueueFull:
    return QueueFull(
        f"The queue of {revision.function} is full; come back later.", retry_after_s=retry_after_s(revision, status)
    )


def retry_after_s(revision: Revision, status: FunctionStatus | None) -> float:
    """When half of what is queued now will have been served, by what is known of depth, workers and service time.

    Half, because a queue that has room again should not stay empty until its callers come back.
    """
    if status is None or status.queued is None:
        return 5.0
    slots = max(1, status.workers.ready or status.wanted) * revision.spec.parallel_calls
    service_s = status.service_s if status.service_s is not None else 1.0
    wait_s = status.queued / 2 * service_s / slots
    if not status.workers.ready:
        wait_s += status.cold_start_s or 0.0
    return min(max(wait_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size:,} bytes"
