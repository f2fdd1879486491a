"""A function whose GPU no node has, so that its calls stay queued. Its argument is a text."""

from __future__ import annotations

from gpufn import gpu_function


@gpu_function(gpu="T5000")
def nowhere_text(x: str) -> int:
    return len(x)
