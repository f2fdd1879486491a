"""The trace of torch's profiler, with a stand-in for torch; at the end with the real one, if it is installed."""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib
import importlib.util
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.frames import Trace, Traced
from gpufn_runtime.worker.execute import call_ranges
from gpufn_runtime.worker.gpu import cupti, torch_trace
from gpufn_runtime.worker.gpu.torch_session import CannotTrace
from gpufn_runtime.worker.gpu.torch_trace import record
from tests import torch_stand_in

_MODULES = ("torch", "torch.autograd", "torch.autograd.profiler", "torch.profiler")


class Link:
    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[tuple[Traced, bytes]] = queue.SimpleQueue()

    def send(self, frame: Traced, body: bytes = b"") -> None:
        self.sent.put((frame, body))


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    torch_stand_in.write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in _MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    torch = importlib.import_module("torch")
    importlib.import_module("torch.profiler")
    yield torch
    for name in _MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def gpu(torch: Any) -> Any:
    """The stand-in's torch.cuda, with two devices. The process uses the second one."""
    torch.cuda.has_gpu = True
    return torch.cuda


def during(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do something in the time of the trace, instead of waiting."""
    monkeypatch.setattr(time, "sleep", lambda _: do())


def test_a_trace_has_operators_and_a_range_for_each_call(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        assert call_ranges.opener is not None
        assert call_ranges.within(call_ranges.opener, max, (1, 2), {}) == 2

    during(monkeypatch, call)
    events = json.loads(gzip.decompress(record(5.0)))["traceEvents"]
    assert [event["name"] for event in events] == ["aten::mm", "batch or hook"]
    assert call_ranges.opener is None


def test_a_worker_without_torch_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # another test may have imported the real one
    link: Any = Link()
    torch_trace.start(link, Trace(4, 0.01, is_gpu=True))
    frame, body = link.sent.get(timeout=30)
    assert (frame.number, frame.error.code, body) == (4, "conflict", b"")
    assert isinstance(frame.error, ErrorInfo)


def test_a_profiler_that_fails_ends_the_trace_and_no_call(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = importlib.import_module("torch.profiler")

    def fail(*_: object) -> None:
        raise RuntimeError("user code profiles already")

    monkeypatch.setattr(profiler.profile, "start", fail)
    with pytest.raises(CannotTrace, match="user code profiles already"):
        record(1.0)
    assert call_ranges.opener is None


def test_a_full_disk_is_reported(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the thread ended without an answer, and the client waited for a minute."""

    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", fail)
    with pytest.raises(CannotTrace, match="No space left"):
        record(1.0)


def test_a_gpu_is_recorded_on_the_device_that_the_process_uses(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    during(monkeypatch, lambda: None)
    events = json.loads(gzip.decompress(record(1.0)))["traceEvents"]
    assert [event["cat"] for event in events] == ["cpu_op", "kernel"]
    assert (gpu.kernels, gpu.current) == ([1], 0)


def test_a_process_that_has_not_used_its_gpu_gets_no_kernel_of_ours(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.memory = [0, 0]
    during(monkeypatch, lambda: None)
    assert b"kernel" not in gzip.decompress(record(1.0))
    assert gpu.kernels == []


def test_a_trace_without_kernels_is_an_error_with_the_reason_of_cupti(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.modules["torch.profiler"].records_kernels = False  # type: ignore[attr-defined]
    monkeypatch.setattr(cupti, "why_nothing_is_recorded", lambda: "CUPTI_ERROR_X")
    during(monkeypatch, lambda: None)
    with pytest.raises(CannotTrace, match="CUPTI_ERROR_X"):
        record(1.0)
    assert not left_behind(sys.modules["torch"])


def test_a_torch_without_cupti_is_refused(gpu: Any) -> None:
    profiler: Any = sys.modules["torch.profiler"]
    profiler.supported = {profiler.ProfilerActivity.CPU}
    with pytest.raises(CannotTrace, match="without CUPTI"):
        record(1.0)
    assert not left_behind(sys.modules["torch"])


@pytest.mark.parametrize("is_running", [True, False], ids=["runs", "is prepared"])
def test_a_session_of_user_code_is_not_disturbed(torch: Any, is_running: bool) -> None:
    """Bug: the second session of torch's profiler ended the worker with a segmentation fault."""
    session = torch.autograd.profiler.profile()
    if is_running:
        torch.autograd.profiler._is_profiler_enabled = True
    else:
        session._prepare_trace()
    with pytest.raises(CannotTrace, match="code of the function"):
        record(1.0)
    session.stop()
    torch.autograd.profiler._is_profiler_enabled = False
    assert not left_behind(torch)


@pytest.mark.parametrize("error", [None, ValueError("no JSON")])
def test_a_session_of_user_code_waits_for_the_end_of_the_trace(
    torch: Any, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    session = torch.autograd.profiler.profile()
    entered = []

    def begin() -> None:
        thread = threading.Thread(target=session._prepare_trace, daemon=True)
        thread.start()
        entered.extend([thread, session.entered])
        if error is not None:
            raise error

    during(monkeypatch, begin)
    with contextlib.nullcontext() if error is None else pytest.raises(CannotTrace):
        record(1.0)
    thread, was_entered = entered
    thread.join(5)
    assert (was_entered, session.entered) == (False, True)


def test_no_trace_begins_while_a_cuda_graph_is_captured(gpu: Any) -> None:
    gpu.graph.default_capture_stream = "a stream"
    gpu.capturing = iter([True])
    with pytest.raises(CannotTrace, match="CUDA graph"):
        record(1.0)
    assert not left_behind(sys.modules["torch"])


@pytest.mark.parametrize(("polls", "sleeps"), [(3, 3), (10**6, 200)], ids=["ends", "does not end"])
def test_a_trace_ends_after_a_capture(gpu: Any, monkeypatch: pytest.MonkeyPatch, polls: int, sleeps: int) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept[1:]))  # the first sleep is the trace
    gpu.graph.default_capture_stream = "a stream"
    gpu.capturing = itertools.chain([False], itertools.repeat(True, polls))
    record(1.0)
    assert len(slept) - 1 == pytest.approx(sleeps, abs=1)


@pytest.mark.parametrize("before", [None, "1"])
def test_the_variables_that_torch_sets_are_restored(
    torch: Any, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is None:
        monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    else:
        monkeypatch.setenv("TEARDOWN_CUPTI", before)
    within: list[str | None] = []
    during(monkeypatch, lambda: within.append(os.environ.get("TEARDOWN_CUPTI")))
    record(1.0)
    assert (within, os.environ.get("TEARDOWN_CUPTI")) == (["0"], before)


def left_behind(torch: Any) -> list[str]:
    """What a trace must not leave in the worker."""
    profiler = torch.autograd.profiler
    found = {
        "a session": profiler._is_profiler_enabled,
        "a wrapper": profiler.profile._prepare_trace.__module__ != profiler.__name__,
        "ranges": call_ranges.opener is not None,
        "a variable": "TEARDOWN_CUPTI" in os.environ,
    }
    return [name for name, is_found in found.items() if is_found]


def test_a_start_that_fails_in_the_middle_is_stopped(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.profiler.profile.start

    def fail(profile: Any) -> None:
        start(profile)
        raise ValueError("no JSON")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    with pytest.raises(CannotTrace, match="no JSON"):
        record(1.0)
    assert not left_behind(torch)


@pytest.mark.parametrize("fails_at", ["begin", "end"])
def test_a_range_that_fails_does_not_fail_the_call(fails_at: str) -> None:
    """Bug: an error of torch in the range became the error of the call."""

    @contextlib.contextmanager
    def open_range(_: str) -> Iterator[None]:
        if fails_at == "begin":
            raise RuntimeError("NVTX functions not installed")
        yield
        raise RuntimeError("the profiler has ended")

    assert call_ranges.within(open_range, max, (1, 2), {}) == 2
    with pytest.raises(ValueError, match="of the call"):
        call_ranges.within(open_range, fail_call, (), {})


def fail_call() -> None:
    raise ValueError("of the call")


def test_a_trace_that_is_too_large_is_not_sent(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    during(monkeypatch, lambda: None)
    monkeypatch.setattr(torch_trace, "MAX_TRACE_BYTES", 10)
    with pytest.raises(CannotTrace, match="less than 5 s"):
        record(5.0)


def test_a_trace_is_the_body_of_its_answer(torch: Any) -> None:
    link: Any = Link()
    torch_trace.start(link, Trace(5, 0.01, is_gpu=True))
    frame, body = link.sent.get(timeout=30)
    assert frame == Traced(5)
    assert json.loads(gzip.decompress(body))["traceEvents"]


_USER_CODE_PROFILES_TOO = """
import gzip, json, threading, time
from gpufn_runtime.worker.gpu.torch_session import CannotTrace
from gpufn_runtime.worker.gpu.torch_trace import record
import torch, torch.profiler

def profiled():
    with torch.profiler.profile() as session:
        torch.ones(3) @ torch.ones(3)
    return len(session.events())

prepared = torch.profiler.profile()
for begin in (prepared.prepare_trace, prepared.start_trace):
    begin()
    try:
        record(1.0)
    except CannotTrace:
        print("refused")
prepared.stop_trace()
counts = []
user = threading.Thread(target=lambda: counts.append(profiled()))
time.sleep = lambda _: user.start()
names = {each["name"] for each in json.loads(gzip.decompress(record(1.0)))["traceEvents"]}
user.join()
print(counts[0] > 0, profiled() > 0)
"""


def test_user_code_profiles_beside_a_trace_with_the_real_torch() -> None:
    """Bug: it ended the worker with a segmentation fault."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    ended = subprocess.run(
        [sys.executable, "-c", _USER_CODE_PROFILES_TOO], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["refused", "refused", "True", "True"]), ended.stderr
