"""The trace of torch's profiler, with a stand-in for torch. The real one was run by hand."""

from __future__ import annotations

import contextlib
import errno
import gzip
import importlib
import json
import queue
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.frames import Trace, Traced
from gpufn_runtime.worker.execute import call_ranges
from gpufn_runtime.worker.gpu import torch_trace
from gpufn_runtime.worker.gpu.torch_trace import CannotTrace, record
from tests import torch_stand_in


class Link:
    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[tuple[Traced, bytes]] = queue.SimpleQueue()

    def send(self, frame: Traced, body: bytes = b"") -> None:
        self.sent.put((frame, body))


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    torch_stand_in.write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("torch", "torch.profiler"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    yield importlib.import_module("torch")
    for name in ("torch", "torch.profiler"):
        sys.modules.pop(name, None)


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


def test_a_worker_without_torch_reports_it() -> None:
    assert "torch" not in sys.modules
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
