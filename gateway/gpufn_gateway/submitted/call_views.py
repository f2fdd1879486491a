"""What is told of a submitted call: its status, why it waits, until when, and the number of its last event. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.protocol.messages import HeldBy
from gpufn_core.protocol.records import CallRecord, DeadLetter
from gpufn_core.protocol.reports import FunctionStatus, Waiting, WaitReason
from gpufn_core.spec.function_spec import FunctionSpec

# Without room or with workers that crash, nobody knows when a call will start.
_KNOWN_WAITS = (None, WaitReason.STARTING)


def running(record: CallRecord, held: HeldBy | None) -> CallRecord:
    """The record of a call that has not ended, with what the runner that has it says."""
    if held is None or held.waits_on or record.state.ended:
        return record
    return msgspec.structs.replace(
        record,
        state=InvocationState.RUNNING,
        started_at=held.started_at,
        attempt=held.attempt,
        worker=held.worker,
        queue_s=max(held.started_at - record.submitted_at, 0.0),
    )


def status(record: CallRecord, held: HeldBy | None = None) -> dict[str, Any]:
    """Without why it waits (`waits`), which takes more than the record to know."""
    record = running(record, held)
    return {
        "id": record.id,
        "function": f"{record.function}.{record.method}" if record.method else record.function,
        "revision": record.revision,
        "state": record.state,
        "priority": record.priority,
        "parent": record.parent or None,
        "trace": record.trace or None,
        "submitted_at": record.submitted_at,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "attempt": record.attempt,
        "attempts": record.attempts,
        "worker": record.worker,
        "progress": None if held is None else held.progress,
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


def waits(
    record: CallRecord,
    place: int | None,
    spec: FunctionSpec | None,
    function: FunctionStatus | None,
    now: float,
    *,
    held: HeldBy | None = None,
) -> dict[str, Any]:
    """`waiting`, `place` and `eta_s` of a call that is queued; `place` None means unknown."""
    waiting = why_it_waits(record, function, now, held=held) or _in_line(place, function)
    eta_s = None
    if waiting.reason in (WaitReason.TURN, WaitReason.RETRY):
        place, eta_s = None, waiting.eta_s
    elif place is not None and spec is not None and function is not None and record.revision == function.serving:
        eta_s = _eta_s(place, spec, function)
    return {"waiting": waiting, "place": place, "eta_s": eta_s}


def why_it_waits(
    record: CallRecord, function: FunctionStatus | None, now: float, *, held: HeldBy | None = None
) -> Waiting | None:
    """Of a call that is queued, as far as that is known without its place there."""
    if held is not None and held.waits_on:
        return Waiting(WaitReason.TURN, f"it waits for its turn on {held.waits_on}")
    if record.not_before > now:
        left_s = record.not_before - now
        return Waiting(WaitReason.RETRY, f"attempt {record.attempt} starts in {left_s:.1f} s", left_s)
    if function is None:
        return None
    return function.waiting if record.revision == function.serving else function.waiting_of.get(record.revision)


def event_number(state: InvocationState, attempt: int) -> int:
    """Grows with each change of state: queued, running, ended, per attempt. So any gateway knows what was missed.

    >>> event_number(InvocationState.RUNNING, 1) < event_number(InvocationState.QUEUED, 2)
    True
    """
    phase = 2 if state.ended else int(state is InvocationState.RUNNING)
    return 10 * attempt + phase


def links(invocation: str) -> dict[str, str]:
    here = f"/v1/invocations/{invocation}"
    return {"self": here, "result": f"{here}/result", "events": f"{here}/events"}


def letter(found: DeadLetter) -> dict[str, Any]:
    here = f"/v1/dlq/{found.function}/{found.id}"
    told = msgspec.structs.asdict(found)
    del told["webhook"]  # an address may hold a secret, and whoever may read sees this
    return {**told, "links": {"self": here, "payload": f"{here}/payload"}}


def _in_line(place: int | None, function: FunctionStatus | None) -> Waiting:
    if function is None:
        return Waiting(WaitReason.UNKNOWN, "the controller has not reported on its function yet")
    if place is None:
        return Waiting(WaitReason.UNKNOWN, "it is about to be taken, or to be told of")
    before = place - 1
    if not before:
        return Waiting(WaitReason.OTHERS, "it is next: it waits for a free slot")
    return Waiting(WaitReason.OTHERS, f"{before:,} {'call is' if before == 1 else 'calls are'} before it")


def _eta_s(place: int, spec: FunctionSpec, function: FunctionStatus) -> float | None:
    """Until it starts, by what is known of workers and service time. `place` counts the calls that no worker has, so
    those that gather in workers, which the status counts as queued, go before it as well."""
    waiting = function.waiting
    if not function.workers.ready and (waiting.reason if waiting is not None else None) not in _KNOWN_WAITS:
        return None
    start_s, held = 0.0, 0
    workers = max(1, function.workers.ready or function.wanted)
    slots = workers * spec.parallel_calls
    if function.workers.ready:
        held = slots if function.running is None else min(function.running, slots)
        gathering = workers * spec.slots - slots
        held += gathering if function.queued is None else min(gathering, max(0, function.queued - place))
    else:
        known = function.cold_start_s if waiting is None or waiting.eta_s is None else waiting.eta_s
        if known is None:
            return None
        start_s = known
    before = max(0, place + held - slots)  # so many have to end
    if before and function.service_s is None:
        return None
    return start_s + before / slots * (function.service_s or 0.0)


def _timings(record: CallRecord) -> dict[str, float]:
    """Seconds by phase, as far as they are known."""
    phases = {"queue_s": record.queue_s}
    if (cold := record.cold_start) is not None:
        phases |= {f"{phase}_s": seconds for phase, seconds in cold.phases.items()}
    if record.gather_s:
        phases["gather_s"] = record.gather_s
    phases["run_s"] = record.run_s
    return {phase: seconds for phase, seconds in phases.items() if seconds is not None}
