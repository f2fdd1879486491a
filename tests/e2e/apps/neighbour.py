"""A function of another user."""

from __future__ import annotations

from gpufn import gpu_function


@gpu_function(idle_timeout=60)
def neighbour() -> int:
    return 1
