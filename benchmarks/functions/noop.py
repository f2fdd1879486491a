"""A function that does nothing, to measure the cost of a call, and one that blocks its only worker."""

from __future__ import annotations

import time

from gpufn import gpu_function


@gpu_function(min_workers=1, max_workers=1, concurrency=8, idle_timeout=600)
def noop(x: int = 0) -> int:
    return x


@gpu_function(min_workers=1, max_workers=1, idle_timeout=600, timeout=86_400)
def held(x: int = 0) -> int:
    time.sleep(x)
    return x
