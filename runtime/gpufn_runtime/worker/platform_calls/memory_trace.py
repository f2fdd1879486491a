"""Trace of the memory that a worker allocates, by `tracemalloc`, in its own thread.

It records memory that Python allocates after the trace starts and has not released when it ends. It excludes memory of
C libraries that allocate past Python, and memory of a GPU.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
import tracemalloc
from typing import Final

from gpufn_core.domain.profiles.stacks import PLATFORM, shortened
from gpufn_core.protocol.frames import Trace, Traced
from gpufn_core.protocol.profiles import LONGEST_PROFILE_S, MAX_STACKS_BYTES
from gpufn_runtime.worker.link import Link

_PACKAGES: Final = ("gpufn", "gpufn_core", "gpufn_platform", "gpufn_runtime")
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
    """Return the stacks that allocated memory, with their bytes. A frame is a line: there are no names of functions.

    Frames of the platform are left out, so what they allocate counts for the frame of the function that called them.
    Stacks without a frame of the function are one stack, PLATFORM: inputs, results and buffers.
    """
    platform = _folders_of_platform()
    library = (f"{sysconfig.get_path('stdlib')}/", "<frozen ")
    lines = []
    platform_bytes = 0
    for statistic in snapshot.statistics("traceback"):
        frames = [each for each in statistic.traceback if not each.filename.startswith(platform)]
        has_platform = len(frames) < len(statistic.traceback)
        if has_platform and all(_is_in_library(each.filename, library) for each in frames):
            platform_bytes += statistic.size
            continue
        names = (f"{_shortened(each.filename)}:{each.lineno}" for each in frames)
        lines.append(f"{';'.join(names)} {statistic.size}\n")
    if platform_bytes:
        lines.append(f"{PLATFORM} {platform_bytes}\n")
    return "".join(lines)


def _folders_of_platform() -> tuple[str, ...]:
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _PACKAGES)
    return tuple(f"{os.path.dirname(file)}/" for file in files if file)


def _is_in_library(path: str, library: tuple[str, ...]) -> bool:
    return path.startswith(library) and "/site-packages/" not in path


def _shortened(path: str) -> str:
    """Return a path relative to the bundle, which is the current folder, or to the packages."""
    path = path.removeprefix(f"{os.getcwd()}/")
    return path.rpartition("/site-packages/")[2].replace(";", ",").replace("\n", " ")
