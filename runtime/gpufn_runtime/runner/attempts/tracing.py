"""Recording of spans: which attempts are traced, and the report of their spans to the gateways."""

from __future__ import annotations

from gpufn_core.domain.invocation import Outcome, OutcomeKind, StartReason
from gpufn_core.domain.trace_context import is_traced, keeps
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.spans import MAX_TEXT_CHARS, Span, SpanError
from gpufn_platform.process.clock import Clock
from gpufn_platform.traces.reporter import SpanReporter
from gpufn_runtime.runner.core import spans
from gpufn_runtime.runner.core.actions import Settle
from gpufn_runtime.runner.core.attempt import Attempt

_SUCCEEDED = OutcomeKind.SUCCEEDED  # each call needs it, and Python looks up a member of an enum slowly


class Tracing:
    """Records attempts whose message is traced. A message without `trace` costs one comparison at its caller."""

    def __init__(self, reporter: SpanReporter, node: str, clock: Clock) -> None:
        self._reporter = reporter
        self._node = node
        self._clock = clock

    def end(self, end: Settle) -> None:
        message = end.attempt.message
        trace, run = message.trace, end.attempt.run
        # Most calls are not recorded, and decode nothing.
        if is_traced(trace) and keeps(
            trace,
            is_error=end.outcome.kind is not _SUCCEEDED,
            took_s=run.started_at + run.elapsed_s - message.submitted_at,
        ):
            self._add(spans.of_end(end, self._node))

    def interrupt(self, attempt: Attempt, reason: StartReason, message: str) -> None:
        """Record an attempt that is handed back to its queue."""
        if is_traced(attempt.message.trace):
            error = SpanError(reason.value, message[:MAX_TEXT_CHARS])
            self._add(spans.of_interrupted(attempt, error, self._clock.time(), self._node))

    def refuse(self, message: InvocationMessage, outcome: Outcome) -> None:
        if is_traced(message.trace):
            self._add(spans.of_refusal(message, outcome, self._clock.time()))

    def finish(self) -> None:
        self._reporter.flush()

    def _add(self, recorded: list[Span]) -> None:
        if recorded:
            self._reporter.add(recorded)
