"""Views of a submitted call: its status, why it waits, its estimated start, and its event number. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.domain.trace_context import traceparent
from gpufn_core.protocol.messages import CallLocation
from gpufn_core.protocol.records import CallRecord, DeadLetter
from gpufn_core.protocol.reports import FunctionStatus, Waiting, WaitReason
from gpufn_core.spec.function_spec import FunctionSpec

# With other reasons, such as no capacity or crashing workers, the start of a call cannot be estimated.
_KNOWN_WAITS = (None, WaitReason.STARTING)


def as_running(record: CallRecord, holder: CallLocation | None) -> CallRecord:
    """Update the record of a call that has not ended with the report of the runner that holds it."""
    if holder is None or holder.waits_on or record.state.ended:
        return record
    return msgspec.structs.replace(
        record,
        state=InvocationState.RUNNING,
        started_at=holder.started_at,
        attempt=holder.attempt,
        worker=holder.worker,
        queue_s=max(holder.started_at - record.submitted_at, 0.0),
    )


def status(record: CallRecord, holder: CallLocation | None = None) -> dict[str, Any]:
    """Return the status of a call, without the reason why it waits: `wait_fields` needs more than the record."""
    record = as_running(record, holder)
    return {
        "id": record.id,
        "function": f"{record.function}.{record.method}" if record.method else record.function,
        "revision": record.revision,
        "state": record.state,
        "priority": record.priority,
        "key": record.owner,
        "parent": record.parent or None,
        "trace": traceparent(record.id, record.trace) or None,
        "submitted_at": record.submitted_at,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "attempt": record.attempt,
        "attempts": record.attempts,
        "worker": record.worker,
        "progress": None if holder is None else holder.progress,
        "queue_s": record.queue_s,
        "run_s": record.run_s,
        "gpu_s": record.gpu_s,
        "timings": _timings(record),
        "size": record.size,
        "error": record.error,
        "waiting": None,
        "place": None,
        "eta_s": None,
        "links": links(record.id),
    }


def wait_fields(
    record: CallRecord,
    place: int | None,
    spec: FunctionSpec | None,
    function: FunctionStatus | None,
    now: float,
    *,
    holder: CallLocation | None = None,
) -> dict[str, Any]:
    """Return `waiting`, `place` and `eta_s` of a queued call; `place` None means unknown."""
    waiting = wait_reason(record, function, now, holder=holder) or _queue_position(place, function)
    eta_s = None
    if waiting.reason in (WaitReason.TURN, WaitReason.RETRY):
        place, eta_s = None, waiting.eta_s
    elif place is not None and spec is not None and function is not None and record.revision == function.serving:
        eta_s = _eta_s(place, spec, function)
    return {"waiting": waiting, "place": place, "eta_s": eta_s}


def wait_reason(
    record: CallRecord, function: FunctionStatus | None, now: float, *, holder: CallLocation | None = None
) -> Waiting | None:
    """Return why a queued call waits, if that is known without its place in the queue."""
    if holder is not None and holder.waits_on:
        return Waiting(WaitReason.TURN, f"it waits for its turn on {holder.waits_on}")
    if record.not_before > now:
        remaining_s = record.not_before - now
        return Waiting(WaitReason.RETRY, f"attempt {record.attempt} starts in {remaining_s:.1f} s", remaining_s)
    if function is None:
        return None
    return function.waiting if record.revision == function.serving else function.waiting_of.get(record.revision)


def event_number(state: InvocationState, attempt: int) -> int:
    """Return a number that grows with each state change (queued, running, ended) and each attempt.

    With it, any gateway can determine which events a client has missed.

    >>> event_number(InvocationState.RUNNING, 1) < event_number(InvocationState.QUEUED, 2)
    True
    """
    phase = 2 if state.ended else int(state is InvocationState.RUNNING)
    return 10 * attempt + phase


def links(invocation: str) -> dict[str, str]:
    url = f"/v1/invocations/{invocation}"
    return {"self": url, "result": f"{url}/result", "events": f"{url}/events"}


def letter(dead_letter: DeadLetter) -> dict[str, Any]:
    url = f"/v1/dlq/{dead_letter.function}/{dead_letter.id}"
    fields = msgspec.structs.asdict(dead_letter)
    del fields["webhook"]  # the URL may contain a secret, and every reader sees this view
    return {**fields, "links": {"self": url, "payload": f"{url}/payload"}}


def _queue_position(place: int | None, function: FunctionStatus | None) -> Waiting:
    if function is None:
        return Waiting(WaitReason.UNKNOWN, "the controller has not reported on its function yet")
    if place is None:
        return Waiting(WaitReason.UNKNOWN, "a runner is about to take it or to report it")
    ahead = place - 1
    if not ahead:
        return Waiting(WaitReason.OTHERS, "it is next: it waits for a free slot")
    return Waiting(WaitReason.OTHERS, f"{ahead:,} {'call is' if ahead == 1 else 'calls are'} before it")


def _eta_s(place: int, spec: FunctionSpec, function: FunctionStatus) -> float | None:
    """Estimate the seconds until a call starts, from the workers and the service time.

    `place` counts only calls that no worker has. Calls that gather in workers, which the status counts as queued, are
    ahead of it as well.
    """
    waiting = function.waiting
    if not function.workers.ready and (waiting.reason if waiting is not None else None) not in _KNOWN_WAITS:
        return None
    start_s, occupied = 0.0, 0
    workers = max(1, function.workers.ready or function.wanted)
    slots = workers * spec.parallel_calls
    if function.workers.ready:
        occupied = slots if function.running is None else min(function.running, slots)
        gathering = workers * spec.slots - slots
        occupied += gathering if function.queued is None else min(gathering, max(0, function.queued - place))
    else:
        cold_start_s = function.cold_start_s if waiting is None or waiting.eta_s is None else waiting.eta_s
        if cold_start_s is None:
            return None
        start_s = cold_start_s
    ahead = max(0, place + occupied - slots)  # calls that have to end first
    if ahead and function.service_s is None:
        return None
    return start_s + ahead / slots * (function.service_s or 0.0)


def _timings(record: CallRecord) -> dict[str, float]:
    """Return the seconds of each known phase."""
    phases = {"queue_s": record.queue_s}
    if (cold := record.cold_start) is not None:
        phases |= {f"{phase}_s": seconds for phase, seconds in cold.phases.items()}
    if record.gather_s:
        phases["gather_s"] = record.gather_s
    phases["run_s"] = record.run_s
    return {phase: seconds for phase, seconds in phases.items() if seconds is not None}
