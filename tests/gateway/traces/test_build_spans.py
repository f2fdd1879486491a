"""Traces of builds, from the changes of their record."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.engine import Build, BuildStage, BuildState
from gpufn_core.domain.trace_context import span_id, trace_id
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import digest_of
from gpufn_core.protocol.spans import Span
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_gateway.traces.build_spans import BuildTraces
from gpufn_gateway.traces.tracing import Sampling

ID = "01k9xq3zr7c8m2v5t0w4y6b1d3"
MODEL = ModelSpec(parameter="net", files=(ModelFile("net.onnx", digest_of(b""), 1),))


class Clock:
    now = 0.0

    def time(self) -> float:
        return self.now


def built(state: BuildState, *, ratio: float = 1.0, leads: bool = True, error: ErrorInfo | None = None) -> list[Span]:
    """The spans of a build that waited two seconds, and ended with its second stage."""
    recorded: list[Span] = []
    clock: Any = Clock()
    reporter: Any = type("Reporter", (), {"add": lambda self, spans: recorded.extend(spans)})()
    traces = BuildTraces(Sampling(ratio), reporter, clock)
    traces.leads = lambda: leads
    build = Build(id=ID, model=MODEL, device="cpu", created_at=100.0, function="f")
    traces.follow(build)
    build = msgspec.structs.replace(build, state=BuildState.BUILDING, started_at=102.0)
    for at, stage in ((102.5, BuildStage.INGEST), (103.0, BuildStage.INGEST), (104.0, BuildStage.COMPILE)):
        clock.now = at
        traces.follow(msgspec.structs.replace(build, stage=stage))
    ended = msgspec.structs.replace(build, state=state, stage=BuildStage.COMPILE, ended_at=110.0, error=error)
    traces.follow(ended)
    traces.follow(ended)  # the record may change after the end
    return recorded


def test_a_build_has_a_span_for_its_wait_and_for_each_stage() -> None:
    whole, *parts = built(BuildState.SUCCEEDED)
    assert (whole.name, whole.trace, whole.id, whole.start, whole.end) == (
        "build net.onnx", trace_id(ID), span_id(ID), 100.0, 110.0,
    )  # fmt: skip
    assert [(span.name, span.start, span.end) for span in parts] == [
        ("queue", 100.0, 102.0),
        ("ingest", 102.0, 104.0),
        ("compile", 104.0, 110.0),
    ]
    assert {span.parent for span in parts} == {whole.id}


def test_a_build_that_fails_is_recorded_though_it_is_not_sampled() -> None:
    spans = built(BuildState.FAILED, ratio=0.0, error=ErrorInfo("build_failed", "no engine"))
    assert [span.name for span in spans if span.error is not None] == ["build net.onnx", "compile"]


@pytest.mark.parametrize(("ratio", "leads"), [(0.0, True), (1.0, False)])
def test_which_builds_are_not_recorded(ratio: float, leads: bool) -> None:
    assert built(BuildState.SUCCEEDED, ratio=ratio, leads=leads) == []
