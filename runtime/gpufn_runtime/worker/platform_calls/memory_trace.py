"""Trace of the memory that a worker allocates, by `tracemalloc`, in its own thread.

It records memory that Python allocates after the trace starts and has not released when it ends. It excludes memory of
C libraries that allocate past Python, and memory of a GPU.
"""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from typing import Final

from gpufn_core.domain.profiles.stacks import shortened
from gpufn_core.protocol.frames import Trace, Traced
from gpufn_core.protocol.profiles import LONGEST_PROFILE_S, MAX_STACKS_BYTES
from gpufn_runtime.worker.link import Link

_FRAMES: Final = 30  # per stack; more frames cost more memory and time


def start(link: Link, frame: Trace) -> None:
    threading.Thread(target=_trace, args=(link, frame), name="gpufn-memory", daemon=True).start()


def _trace(link: Link, frame: Trace) -> None:
    is_ours = not tracemalloc.is_tracing()  # user code may trace too
    if is_ours:
        tracemalloc.start(_FRAMES)
    try:
        time.sleep(min(frame.seconds, LONGEST_PROFILE_S))
        snapshot = tracemalloc.take_snapshot()
    finally:
        if is_ours:
            tracemalloc.stop()
    link.send(Traced(frame.number), shortened(folded(snapshot), MAX_STACKS_BYTES).encode())


def folded(snapshot: tracemalloc.Snapshot) -> str:
    """Return the stacks that allocated memory, with their bytes. A frame is a line: there are no names of functions."""
    lines = []
    for statistic in snapshot.statistics("traceback"):
        frames = (f"{_shortened(each.filename)}:{each.lineno}" for each in statistic.traceback)
        lines.append(f"{';'.join(frames)} {statistic.size}\n")
    return "".join(lines)


def _shortened(path: str) -> str:
    """Return a path relative to the bundle, which is the current folder, or to the packages."""
    path = path.removeprefix(f"{os.getcwd()}/")
    return path.rpartition("/site-packages/")[2].replace(";", ",").replace("\n", " ")
