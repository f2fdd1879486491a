"""A function whose GPU no node has, so that its calls wait."""

from __future__ import annotations

from gpufn import gpu_function


@gpu_function(gpu="T5000")
def nowhere(number: int) -> int:
    return number
