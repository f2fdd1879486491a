"""The table of a trace: kernels, or operators without a GPU; and its flame graph."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from gpufn_core.domain.profiles import chrome_trace
from gpufn_core.domain.profiles.chrome_trace import Busiest, flame_graph, summary
from gpufn_core.domain.profiles.stacks import Stack

EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 700.0},
    {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 200},
    {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 300.5},
    {"ph": "X", "cat": "kernel", "name": "relu", "dur": 100},
    {"ph": "M", "name": "process_name", "pid": 1},
]


def packed(trace: Any) -> bytes:
    return gzip.compress(json.dumps(trace).encode())


def test_kernels_count_by_name_the_longest_first() -> None:
    found = summary(packed({"schemaVersion": 1, "traceEvents": EVENTS}), 1)
    assert found == ("kernel", [Busiest("gemm", 2, 500.5 / 1e6)])


def test_without_a_gpu_operators_count() -> None:
    found = summary(packed({"traceEvents": EVENTS[:1]}), 5)
    assert found == ("cpu_op", [Busiest("aten::mm", 1, 700.0 / 1e6)])


@pytest.mark.parametrize(
    "trace",
    [b"", b"not gzip", packed([1]), packed({"traceEvents": 5}), packed({"traceEvents": EVENTS})[:-9]],
    ids=["empty", "not gzip", "a list", "no events", "cut"],  # compressed bytes have the time, which differs
)
def test_a_file_that_is_not_a_trace_has_no_table(trace: bytes) -> None:
    assert summary(trace, 5) is None
    assert flame_graph(trace) is None


def test_a_trace_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_trace, "MAX_BYTES", 50)
    assert summary(packed({"traceEvents": EVENTS}), 5) is None


def test_a_flame_graph_has_kernels_within_the_ranges_of_calls() -> None:
    def event(kind: str, name: str, ts: float, dur: float, tid: int = 7) -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid}

    events = [
        event("kernel", "gemm<1;2>", 12, 20),
        event("gpu_user_annotation", "call 1", 10, 50),
        event("kernel", "relu", 40, 10),
        event("gpu_memcpy", "Memcpy HtoD", 70, 5, tid=9),
        event("cpu_op", "aten::linear", 0, 30, tid=1),
        event("cpu_op", "aten::mm", 10, 20, tid=1),
        event("cpu_op", "aten::mm", 30, 5, tid=1),
        event("ac2g", "an arrow", 0, 90),
        {"ph": "M", "name": "process_name", "pid": "Spans", "tid": "PyTorch Profiler"},
    ]
    assert sorted(flame_graph(packed({"traceEvents": events})) or []) == [
        Stack(("CPU", "aten::linear"), 10),
        Stack(("CPU", "aten::linear", "aten::mm"), 20),
        Stack(("CPU", "aten::mm"), 5),
        Stack(("GPU", "Memcpy HtoD"), 5),
        Stack(("GPU", "call 1"), 20),
        Stack(("GPU", "call 1", "gemm<1,2>"), 20),
        Stack(("GPU", "call 1", "relu"), 10),
    ]


def test_a_flame_graph_of_deeply_nested_events_is_small() -> None:
    events = [{"cat": "kernel", "name": "a", "ts": at, "dur": 10_000 - 2 * at} for at in range(3000)]
    stacks = flame_graph(packed({"traceEvents": events})) or []
    assert max(len(stack.frames) for stack in stacks) == 200
    assert sum(stack.samples for stack in stacks) == 10_000


def test_events_of_impossible_lengths_are_left_out() -> None:
    lengths = (1e308, 1e308, -5.0, 7.0)
    events = [
        {"cat": "kernel", "name": "a", "ts": 0, "dur": length, "tid": lane} for lane, length in enumerate(lengths)
    ]
    trace = packed({"traceEvents": events})
    assert (flame_graph(trace), summary(trace, 5)) == (
        [Stack(("GPU", "a"), 7)],
        ("kernel", [Busiest("a", 1, 7 / 1e6)]),
    )
