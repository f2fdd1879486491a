"""A function for the survival tests that calls another one."""

from __future__ import annotations

import time

from gpufn import gpu_function


@gpu_function(max_workers=2, concurrency=2)
def inner(number: int) -> int:
    time.sleep(0.02)
    return number


@gpu_function(max_workers=2, concurrency=2)
def outer(number: int) -> int:
    return inner.remote(number)
