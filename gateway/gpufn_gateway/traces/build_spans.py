"""Traces of builds: a span for the wait and for each stage, made at the end from the changes of the record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from gpufn_core.domain import trace_context
from gpufn_core.domain.devices.engine import Build, BuildStage, BuildState
from gpufn_core.domain.trace_context import span_id
from gpufn_core.protocol.spans import Span, SpanError, SpanKind, error_of
from gpufn_gateway.traces.tracing import Sampling
from gpufn_platform.process.clock import Clock
from gpufn_platform.traces.reporter import SpanReporter

_MAX_FOLLOWED: Final = 1000  # builds that have not ended

Stages = Sequence[tuple[BuildStage, float]]


class BuildTraces:
    """`leads` returns whether this gateway's controller leads: one gateway records each build."""

    def __init__(self, sampling: Sampling, reporter: SpanReporter, clock: Clock) -> None:
        self._sampling = sampling
        self._reporter = reporter
        self._clock = clock
        self._stages: dict[str, list[tuple[BuildStage, float]]] = {}  # with the times at which they were seen
        self.leads: Callable[[], bool] = lambda: False

    def follow(self, build: Build) -> None:
        """Note a change of a build. A build that ended before this gateway began to follow it is not recorded."""
        if not build.state.ended:
            if len(self._stages) < _MAX_FOLLOWED:
                stages = self._stages.setdefault(build.id, [])
                if build.stage is not None and (not stages or stages[-1][0] is not build.stage):
                    stages.append((build.stage, self._clock.time()))
        elif (seen := self._stages.pop(build.id, None)) is not None and self.leads():
            trace = trace_context.begun(trace_context.trace_id(build.id), self._sampling.ratio, self._sampling.slow_s)
            is_error = build.state is BuildState.FAILED
            took_s = (build.ended_at or 0.0) - build.created_at
            if trace_context.keeps(trace, is_error=is_error, took_s=took_s):
                self._reporter.add(list(spans_of(build, seen)))


def spans_of(build: Build, stages: Stages) -> Iterator[Span]:
    """Yield the spans of a build that has ended."""
    trace, root = trace_context.trace_id(build.id), span_id(build.id)
    end = build.ended_at or build.created_at
    error = error_of(build.state, build.error) if build.state is BuildState.FAILED else None

    def part(name: str, start: float, until: float, error: SpanError | None = None) -> Span:
        start = min(start, end)
        until = min(max(start, until), end)
        own = span_id(build.id, name)
        return Span(trace, own, root, name, SpanKind.INTERNAL, build.function, start, until, error=error)

    yield Span(
        trace, root, "", f"build {build.model.files[0].name}", SpanKind.CONSUMER, build.function, build.created_at, end,
        {
            "gpufn.build": build.id, "gpufn.device": build.device, "gpufn.outcome": build.state.value,
            "gpufn.node": build.builder.partition("/")[0], "gpufn.cached": build.cached,
        }, error,
    )  # fmt: skip
    began = end if build.started_at is None else build.started_at
    yield part("queue", build.created_at, began)
    for number, (stage, seen_at) in enumerate(stages):
        is_last = number + 1 == len(stages)
        until = end if is_last else stages[number + 1][1]
        yield part(stage.value, min(began, seen_at) if number == 0 else seen_at, until, error if is_last else None)
