"""Tracing of the calls that come in through this gateway."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from gpufn_core.domain import trace_context
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.trace_context import SAMPLED
from gpufn_core.errors import GpufnError, InvocationCancelled
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.records import CallRecord
from gpufn_core.protocol.spans import MAX_TEXT_CHARS, SpanError
from gpufn_gateway.calls.prepared_call import PreparedCall
from gpufn_gateway.traces import call_spans
from gpufn_gateway.traces.call_spans import Called
from gpufn_platform.process.clock import Clock
from gpufn_platform.traces.reporter import SpanReporter

_SUCCEEDED = OutcomeKind.SUCCEEDED  # each call needs it, and Python looks up a member of an enum slowly


class Sampling(NamedTuple):
    """`ratio` of the traces that begin here are sampled. Calls that fail, and those from `slow_s` on, are recorded
    anyway."""

    ratio: float
    slow_s: float = math.inf


class Tracing:
    def __init__(self, sampling: Sampling, reporter: SpanReporter, clock: Clock) -> None:
        self._sampling = sampling
        self._reporter = reporter
        self._clock = clock

    def begin(self, traceparent: str = "") -> str:
        """Return the `trace` of the message of a call, whose client may have sent a traceparent."""
        if traceparent and trace_context.is_traceparent(traceparent):
            return trace_context.traced(traceparent, self._sampling.slow_s)
        return trace_context.begun(f"{random.getrandbits(128):032x}", *self._sampling)

    def begin_map(self, trace: str, map_id: str) -> str:
        """Return the `trace` of the items of a map. Without a traceparent, all of its chunks belong to one trace, which
        its id determines. Items have their own traces, which begin without a tracestate."""
        if trace[36:52] != trace_context.NO_SPAN:
            return trace_context.without_state(trace)
        return trace_context.begun(trace_context.trace_id(map_id), *self._sampling)

    def ended(self, call: PreparedCall, reply: ResultReply, ended_at: float) -> None:
        """Record a call that a client waited for."""
        is_error = reply.kind is not _SUCCEEDED
        if call.trace[54] in SAMPLED or is_error or ended_at - call.now >= self._sampling.slow_s:
            self._reporter.add([call_spans.of_reply(_called(call, reply.invocation), reply, ended_at)])

    def failed(self, call: PreparedCall, invocation: str, error: BaseException) -> None:
        """Record a call that ended without a reply."""
        ended_at = self._clock.time()
        if call.trace[54] in SAMPLED or not isinstance(error, InvocationCancelled):
            self._reporter.add([call_spans.of_failure(_called(call, invocation), _described(error), ended_at)])

    def submitted(self, record: CallRecord, start: float) -> None:
        """Record a request that has submitted a call."""
        if trace_context.is_traced(record.trace) and trace_context.is_sampled(record.trace):
            call = Called(record.id, record.function, record.revision, record.method, record.trace, start)
            self._reporter.add([call_spans.of_submission(call, self._clock.time())])

    def cancelled(self, record: CallRecord) -> None:
        """Record a submitted call that was cancelled in its queue: no runner knows it."""
        if trace_context.is_traced(record.trace) and trace_context.is_sampled(record.trace):
            self._reporter.add([call_spans.of_cancelled(record, self._clock.time())])

    def mapped(self, call: Called, first: int, items: int) -> None:
        """Record a request that has added items to a map."""
        if trace_context.is_sampled(call.trace):
            self._reporter.add([call_spans.of_chunk(call, first, items, self._clock.time())])


def _called(call: PreparedCall, invocation: str) -> Called:
    target = call.target
    return Called(invocation, target.name, target.revision.number, target.method.name, call.trace, call.now)


def _described(error: BaseException) -> SpanError | None:
    if isinstance(error, InvocationCancelled):
        return None
    if isinstance(error, GpufnError):
        return SpanError(error.code, error.message[:MAX_TEXT_CHARS])
    return SpanError("platform_error", type(error).__name__)
