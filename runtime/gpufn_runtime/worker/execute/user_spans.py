"""The place of a call in its trace, as the parent of the spans of user code.

User code brings its own OpenTelemetry SDK and exporter. A worker that has not imported it pays for one lookup.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from gpufn_core.domain import trace_context
from gpufn_core.protocol.frames import Run


def attach(run: Run) -> Callable[[], None] | None:
    """Make the attempt the current span of OpenTelemetry, if user code has imported it. Return the function that ends
    this."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    with contextlib.suppress(Exception):  # user code may have replaced the module
        from opentelemetry import context, trace  # noqa: PLC0415

        traceparent = trace_context.seen_by_attempt(run.invocation, run.number, run.trace)
        _, trace_id, span_id, flags = traceparent.split("-")
        state = trace.TraceState.from_header([trace_context.tracestate(run.trace)])
        parent = trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)), state)
        token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))

        def detach() -> None:
            with contextlib.suppress(Exception):
                context.detach(token)

        return detach
    return None
