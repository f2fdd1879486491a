"""Minimal functions: in threads, on the event loop, and one call at a time."""

from __future__ import annotations

from gpufn import gpu_function


@gpu_function(min_workers=1, max_workers=1, concurrency=64, idle_timeout=600)
def echo(x: int) -> dict[str, int]:
    return {"x": x}


@gpu_function(min_workers=1, max_workers=1, concurrency=64, idle_timeout=600)
async def echo_async(x: int) -> dict[str, int]:
    return {"x": x}


@gpu_function(min_workers=1, max_workers=1, idle_timeout=600)
def echo_single(x: int) -> dict[str, int]:
    return {"x": x}
