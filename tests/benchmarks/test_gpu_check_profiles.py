"""The step `profile`: what it asks of a trace, and its report when a trace is refused."""

from __future__ import annotations

import contextlib
import gzip
import json
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_check.checks import profiles
from gpu_check.load import CallStats
from gpu_check.machine import Machine
from gpufn_core.errors import Conflict


def event(kind: str, name: str, dur: float = 5.0, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": 1.5, "dur": dur, "pid": 0, "tid": 7} | fields


CPU = [event("cpu_op", "aten::mm"), event("user_annotation", "call c1")]
GPU = [*CPU, event("kernel", "gemm"), event("gpu_memcpy", "Memcpy HtoD"), event("cuda_runtime", "cudaLaunchKernel")]


def trace(events: list[dict[str, Any]], **fields: Any) -> bytes:
    metadata = {"ph": "M", "name": "process_name", "pid": 1}
    return gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": [*events, metadata]} | fields).encode())


@pytest.mark.parametrize(("is_gpu", "events"), [(True, GPU), (False, CPU)])
def test_a_complete_trace_lacks_nothing(is_gpu: bool, events: list[dict[str, Any]]) -> None:
    counts, wrong = profiles.examine(trace(events), is_gpu=is_gpu)
    assert wrong == []
    assert counts.total() == len(events)


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        (CPU, ["no event kernel", "no event gpu_memcpy", "no event cuda_runtime", "durations", "table", "flame graph"]),
        ([each for each in GPU if each["cat"] != "gpu_memcpy"], ["no event gpu_memcpy"]),
        ([each for each in GPU if each["cat"] != "user_annotation"], ["range of a call"]),
        ([each | {"dur": 0} for each in GPU], ["durations", "flame graph"]),
        ([*GPU, event("cpu_op", "aten::mm", dur=-1.0)], ["durations"]),
        ([*GPU, {"ph": "X", "name": "no time"}], ["no valid trace"]),
        ([*GPU, event("kernel", "gemm", ts="1")], ["no valid trace"]),
    ],
)
def test_each_thing_that_a_trace_of_a_gpu_lacks_is_named(events: list[dict[str, Any]], wrong: list[str]) -> None:
    _, lacks = profiles.examine(trace(events), is_gpu=True)
    assert [word for word, text in zip(wrong, lacks, strict=True) if word not in text] == []


@pytest.mark.parametrize(
    "bad", [b"", b"text", trace(GPU)[:-9], gzip.compress(b"{}")], ids=["empty", "text", "cut", "no events"]
)
def test_a_file_that_no_viewer_opens_is_named(bad: bytes) -> None:
    _, (lack,) = profiles.examine(bad, is_gpu=True)
    assert lack.startswith("no valid trace")


@pytest.mark.parametrize("refused_at", [1, 2, 3])
def test_a_refused_trace_is_reported_with_raw_answers_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, refused_at: int
) -> None:
    calls = CallStats(1.0, [0.002])
    taken: list[bytes] = []

    def traced(platform: Any) -> tuple[bytes, CallStats]:
        if len(taken) + 1 == refused_at:
            raise Conflict("CUPTI_ERROR_X")
        taken.append(trace(CPU))
        return taken[-1], calls

    def invoke(function: str, facts: bool = False) -> dict[str, Any]:
        return {"libcupti": "not loaded"} if facts else {"mean": 1.0}

    platform = SimpleNamespace(deploy=lambda source: compile(source, "checked.py", "exec"), invoke=invoke)
    monkeypatch.setattr(profiles, "up", lambda machine: contextlib.nullcontext(platform))
    monkeypatch.setattr(Machine, "need_module", lambda self, name: None)
    monkeypatch.setattr(profiles, "_calls", lambda platform: calls)
    monkeypatch.setattr(profiles, "_traced", traced)
    finding = profiles.profile(Machine(why_no_gpu="a test"))
    expected = [f"trace {refused_at}: conflict: CUPTI_ERROR_X"] if refused_at < 3 else []
    assert list(finding.wrong) == expected
    assert list(finding.said.values()) == ["not loaded"]
    assert len(finding.figures["events"]) == refused_at - 1
    assert list(finding.figures["p50_ms"]) == ["before", "during", "after"][: 1 if refused_at == 1 else 3]
