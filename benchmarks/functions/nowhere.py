"""A function whose GPU no node has, so that its calls stay queued."""

from __future__ import annotations

from gpufn import gpu_function


@gpu_function(gpu="T5000")
def nowhere(x: int) -> int:
    return x
