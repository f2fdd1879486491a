"""The least a function can do."""

from __future__ import annotations

from gpufn import gpu_function


@gpu_function(min_workers=1, max_workers=1, concurrency=64, idle_timeout=600)
async def echo(x: int) -> dict[str, int]:
    return {"x": x}


@gpu_function(min_workers=1, max_workers=1, idle_timeout=600)
def echo_sync(x: int) -> dict[str, int]:
    return {"x": x}
