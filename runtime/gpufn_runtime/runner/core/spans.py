"""Spans of an attempt that has ended, from facts that the runner has anyway. Pure.

call             kind CONSUMER, or SERVER if a function waits for it; the gateway records the others
  queue          from the submission, or from the time of the retry, until the attempt begins
    place fetch launch load warm resume      phases of the cold start that it waited for
  gather         until its batch runs
  run            its id is the attempt's id: nested calls and spans of user code are below it
"""

from __future__ import annotations

from collections.abc import Iterator

from gpufn_core.domain import trace_context
from gpufn_core.domain.invocation import Outcome, OutcomeKind, StartReason
from gpufn_core.domain.retry_policy import Settlement
from gpufn_core.domain.trace_context import CallTrace, span_id
from gpufn_core.errors import WorkerLost
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import AttemptRecord
from gpufn_core.protocol.spans import Attribute, Span, SpanError, SpanKind, error_of
from gpufn_runtime.runner.core.actions import Settle
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.start_numbers import LOST_MESSAGE

_NO_ERRORS = (OutcomeKind.SUCCEEDED, OutcomeKind.CANCELLED)


def of_end(end: Settle, node: str) -> list[Span]:
    """Return the spans of an attempt that was settled, and of its call if this was its last one."""
    attempt, outcome, run = end.attempt, end.outcome, end.attempt.run
    ended_at = run.started_at + max(run.elapsed_s, end.run_s)
    spans = _of_attempt(attempt, outcome, ended_at, node, gather_s=end.gather_s, gpu_s=end.gpu_s)
    if spans and end.settlement is not Settlement.RETRY and _is_recorded_here(attempt.message):
        spans.append(_of_call(attempt.message, outcome, ended_at))
    return spans


def of_interrupted(attempt: Attempt, error: SpanError, now: float, node: str) -> list[Span]:
    """Return the spans of an attempt that ends without an outcome: the call starts again."""
    outcome = Outcome(OutcomeKind.LOST)
    return _of_attempt(attempt, outcome, now, node, gpu_s=attempt.gpu_s, error=error)


def of_refusal(message: InvocationMessage, outcome: Outcome, now: float) -> list[Span]:
    """Return the span of a call that ends without reaching a worker."""
    is_error = outcome.kind not in _NO_ERRORS
    kept = trace_context.keeps(message.trace, is_error=is_error, took_s=now - message.submitted_at)
    return [_of_call(message, outcome, now)] if kept and _is_recorded_here(message) else []


def _is_recorded_here(message: InvocationMessage) -> bool:
    return bool(message.parent or not message.reply)


def _of_attempt(
    attempt: Attempt,
    outcome: Outcome,
    ended_at: float,
    node: str,
    *,
    gpu_s: float,
    gather_s: float = 0.0,
    error: SpanError | None = None,
) -> list[Span]:
    message, run = attempt.message, attempt.run
    if error is None and outcome.kind not in _NO_ERRORS:
        error = error_of(outcome.kind, outcome.error)
    took_s = ended_at - message.submitted_at
    if not trace_context.keeps(message.trace, is_error=error is not None, took_s=took_s):
        return []
    context = trace_context.of_call(message.id, message.trace)
    number, function, begins_at = message.attempt, message.function, min(run.started_at + gather_s, ended_at)
    queued_at = min(_queued_at(message), run.started_at)
    spans = list(_lost_before(attempt, context, queued_at))
    queue = span_id(message.id, number, "queue")
    spans.append(
        Span(
            context.trace, queue, context.span, "queue", SpanKind.INTERNAL, function, queued_at, run.started_at,
            {"gpufn.attempt": number, "gpufn.priority": message.priority.value},
        )
    )  # fmt: skip
    if run.is_cold:
        spans += _cold_start(attempt, context.trace, queue, queued_at)
    if gather_s:
        gather = span_id(message.id, number, "gather")
        times = run.started_at, begins_at
        spans.append(Span(context.trace, gather, context.span, "gather", SpanKind.INTERNAL, function, *times))
    attributes = _attributes(message, outcome.kind) | {
        "gpufn.attempt": number,
        "gpufn.start_reason": attempt.reason.value,
        "gpufn.node": node,
        "gpufn.worker": attempt.worker.id,
        "gpufn.gpu_s": round(gpu_s, 6),
        "faas.coldstart": run.is_cold,
    }
    if attempt.worker.gpus:
        attributes["gpufn.gpus"] = ",".join(attempt.worker.gpus)
    spans.append(
        Span(
            context.trace, span_id(message.id, number), context.span, "run", SpanKind.INTERNAL, function,
            begins_at, ended_at, attributes, error,
        )
    )  # fmt: skip
    return spans


def _queued_at(message: InvocationMessage) -> float:
    """Return when the call was queued for this attempt: for a retry, when it was due."""
    if message.attempts:
        return max(message.not_before, message.attempts[-1].ended_at)
    return message.not_before or message.submitted_at


def _cold_start(attempt: Attempt, trace: str, parent: str, queued_at: float) -> Iterator[Span]:
    """Yield the phases, one after the other until the worker was ready. A worker may have been started before the call
    came."""
    worker, message = attempt.worker, attempt.message
    if worker.cold_start is None or worker.ready_at is None:
        return
    at = worker.ready_at - worker.cold_start.total_s
    for phase, seconds in worker.cold_start.phases.items():
        start, at = at, at + seconds
        if seconds and at > queued_at:
            phase_id = span_id(message.id, message.attempt, phase)
            start, until = max(start, queued_at), min(at, attempt.run.started_at)
            yield Span(trace, phase_id, parent, phase, SpanKind.INTERNAL, message.function, start, max(start, until))


def _lost_before(attempt: Attempt, context: CallTrace, queued_at: float) -> Iterator[Span]:
    """Yield the span of the attempt before, if its runner died with it. Without a note of its start, which calls with a
    waiting caller never have, it is somewhere in the time before this attempt."""
    message = attempt.message
    if attempt.reason is not StartReason.RUNNER_LOST or message.attempt == 1:
        return
    lost = message.attempts[-1] if message.attempts else None
    if lost is not None and lost.number == message.attempt - 1:
        if lost.outcome is OutcomeKind.LOST and lost.started_at is not None:
            yield _of_record(message, lost, lost.started_at, context)
        return
    yield Span(
        context.trace, span_id(message.id, message.attempt - 1), context.span, "run", SpanKind.INTERNAL,
        message.function, queued_at, attempt.run.started_at,
        _attributes(message, OutcomeKind.LOST) | {"gpufn.attempt": message.attempt - 1},
        SpanError(WorkerLost.code, LOST_MESSAGE),
    )  # fmt: skip


def _of_record(message: InvocationMessage, lost: AttemptRecord, started_at: float, context: CallTrace) -> Span:
    attributes = _attributes(message, lost.outcome) | {
        "gpufn.attempt": lost.number,
        "gpufn.node": lost.node,
        "gpufn.worker": lost.worker,
    }
    return Span(
        context.trace, span_id(message.id, lost.number), context.span, "run", SpanKind.INTERNAL, message.function,
        started_at, max(started_at, lost.ended_at), attributes, SpanError(lost.code, lost.message),
    )  # fmt: skip


def _of_call(message: InvocationMessage, outcome: Outcome, ended_at: float) -> Span:
    context = trace_context.of_call(message.id, message.trace)
    kind = SpanKind.SERVER if message.reply else SpanKind.CONSUMER
    attributes = _attributes(message, outcome.kind) | {"gpufn.attempts": message.attempt}
    error = None if outcome.kind in _NO_ERRORS else error_of(outcome.kind, outcome.error)
    start = min(message.submitted_at, ended_at)
    return Span(
        context.trace, context.span, context.parent, trace_context.call_name(message.function, message.method), kind,
        message.function, start, ended_at, attributes, error, context.link,
    )  # fmt: skip


def _attributes(message: InvocationMessage, outcome: OutcomeKind) -> dict[str, Attribute]:
    return trace_context.attributes(message.id, message.function, message.revision) | {"gpufn.outcome": outcome.value}
