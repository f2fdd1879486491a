"""Tracing of the calls that come in through this gateway."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from typing import NamedTuple

from gpufn_core.domain import trace_context
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import GpufnError, InvocationCancelled
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.records import CallRecord
from gpufn_core.protocol.spans import MAX_TEXT_CHARS, SpanError
from gpufn_gateway.traces import call_spans
from gpufn_gateway.traces.call_spans import Called
from gpufn_platform.process.clock import Clock
from gpufn_platform.traces.reporter import SpanReporter

Ended = asyncio.Future[tuple[ResultReply, bytes]]
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
        ratio, slow_s = self._sampling
        if traceparent and trace_context.is_traceparent(traceparent):
            return trace_context.traced(traceparent, slow_s)
        return trace_context.begun(os.urandom(16).hex(), ratio, slow_s)

    def begin_map(self, trace: str, map_id: str) -> str:
        """Return the `trace` of the items of a map. Without a traceparent, all of its chunks belong to one trace, which
        its id determines."""
        if trace[36:52] != trace_context.NO_SPAN:
            return trace
        return trace_context.begun(trace_context.trace_id(map_id), *self._sampling)

    def follow(self, call: Called, ended: Ended) -> None:
        """Record a call that a client waits for, when it has ended."""
        ended.add_done_callback(functools.partial(self._end, call))

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

    def _end(self, call: Called, ended: Ended) -> None:
        if ended.cancelled():
            return  # the gateway ends
        end, error = self._clock.time(), ended.exception()
        is_error = error is not None or ended.result()[0].kind is not _SUCCEEDED
        if not trace_context.keeps(call.trace, is_error=is_error, took_s=end - call.start):
            return
        if error is None:
            span = call_spans.of_reply(call, ended.result()[0], end)
        else:
            span = call_spans.of_failure(call, _described(error), end)
        self._reporter.add([span])


def _described(error: BaseException) -> SpanError | None:
    if isinstance(error, InvocationCancelled):
        return None
    if isinstance(error, GpufnError):
        return SpanError(error.code, error.message[:MAX_TEXT_CHARS])
    return SpanError("platform_error", type(error).__name__)
