"""A worker's reports about the memory that its code allocates."""

from __future__ import annotations

import json
import queue
import threading
import tracemalloc
from typing import Any

import pytest

from gpufn_core.domain.profiles.stacks import PLATFORM, parse, top
from gpufn_core.protocol.frames import Trace, Traced
from gpufn_runtime.worker.platform_calls import memory_trace


class Link:
    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[tuple[Traced, bytes]] = queue.SimpleQueue()

    def send(self, frame: Traced, body: bytes) -> None:
        self.sent.put((frame, body))


def test_a_stack_has_the_bytes_that_its_line_allocated() -> None:
    tracemalloc.start(5)
    kept = [bytearray(1 << 20) for _ in range(3)]
    snapshot = tracemalloc.take_snapshot()
    tracemalloc.stop()
    (first, *_) = top(parse(memory_trace.folded(snapshot)), 5)
    assert first.frame.startswith("tests/runtime/worker/platform_calls/test_memory_trace.py:") or first.own > 0.9
    assert len(kept) == 3


def test_frames_of_the_platform_are_left_out() -> None:
    link, threads, user = memory_trace.__file__, threading.__file__, "/code/app.py"
    traces = [  # bytes, and frames from the innermost one
        (100, ((link, 155), (threads, 1))),
        (20, ((link, 9),)),
        (7, ((json.__file__, 2), (user, 6), (link, 3), (threads, 1))),
        (5, ((link, 4), (user, 8))),
        (3, ((user, 1), (threads, 1))),
    ]
    snapshot = tracemalloc.Snapshot([(0, size, frames, len(frames)) for size, frames in traces], 30)
    stacks = {stack.frames: stack.samples for stack in parse(memory_trace.folded(snapshot))}
    assert stacks == {
        (PLATFORM,): 120,
        (f"{threads}:1", f"{user}:6", f"{json.__file__}:2"): 7,
        (f"{user}:8",): 5,
        (f"{threads}:1", f"{user}:1"): 3,
    }


@pytest.mark.parametrize("traces_itself", [False, True])
def test_a_trace_ends_without_ending_a_trace_of_user_code(traces_itself: bool) -> None:
    link: Any = Link()
    if traces_itself:
        tracemalloc.start()
    try:
        memory_trace.start(link, Trace(4, 0.01))
        frame, body = link.sent.get(timeout=30)
        assert (frame, tracemalloc.is_tracing()) == (Traced(4), traces_itself)
        assert body.decode() is not None
    finally:
        tracemalloc.stop()
