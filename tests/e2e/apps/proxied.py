"""Functions that clients call through a proxy."""

from __future__ import annotations

from gpufn import gpu_function


@gpu_function(max_workers=1, idle_timeout=60)
def backwards(data: bytes) -> bytes:
    return data[::-1]
