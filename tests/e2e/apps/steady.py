"""A function for the survival tests: it takes a moment and returns its argument."""

from __future__ import annotations

import time

from gpufn import gpu_function


@gpu_function(max_workers=2, concurrency=2)
def steady(number: int) -> int:
    time.sleep(0.02)
    return number
