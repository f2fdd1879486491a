"""Functions with faults that a test switches on."""

from __future__ import annotations

import time
from pathlib import Path

from gpufn import enter, gpu_function, method


@gpu_function(max_workers=1, idle_timeout=60)
def raises(fail: bool) -> str:
    if fail:
        raise RuntimeError("as requested")
    return "fine"


@gpu_function(max_workers=1, idle_timeout=60)
def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@gpu_function(max_workers=1, idle_timeout=1)
class Starts:
    """A class that fails to start while the test's file exists."""

    @enter
    def load(self) -> None:
        flag = Path("{flag}")
        if flag.exists():
            raise RuntimeError(f"{flag} exists")

    @method
    def ping(self) -> str:
        return "pong"
