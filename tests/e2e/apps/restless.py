"""Functions for chaos: each start and each end of one is a line in a file, so that no run goes uncounted."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

from gpufn import Retry, current, gpu_function

IDLE_S = 1
PROCESS = uuid.uuid4().hex
_RETRIES = Retry(50, delay_s=0.05, backoff=1.0, on=(OSError,))


def _note(path: str, number: int, what: str = "start") -> None:
    """Append a line in one write, which a kill cannot split."""
    call = current()
    line = json.dumps(
        {
            "number": number, "call": call.invocation, "attempt": call.attempt,
            "what": what, "at": time.time(), "process": PROCESS,
        }
    )  # fmt: skip
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


@gpu_function(max_workers=2, concurrency=2, idle_timeout=IDLE_S, retries=_RETRIES, timeout=60)
def mark(path: str, number: int, seconds: float = 0.0, fails: str = "", ballast: str = "") -> Any:
    """Record a call. `fails` is "once", so that a retry succeeds, or "always"."""
    _note(path, number)
    time.sleep(seconds)
    _note(path, number, "end")
    if fails == "always":
        raise ValueError("as it was asked to")
    if fails == "once" and current().attempt == 1:
        raise OSError("as it was asked to")
    return [number, ballast] if ballast else number


@gpu_function(max_workers=1, concurrency=4, idle_timeout=IDLE_S, timeout=60)
def series(path: str, number: int, count: int) -> Iterator[int]:
    _note(path, number)
    for item in range(count):
        time.sleep(0.002)
        yield item
    _note(path, number, "end")


@gpu_function(max_workers=1, concurrency=4, idle_timeout=IDLE_S, retries=_RETRIES, timeout=60)
async def nap(path: str, number: int, seconds: float) -> int:
    """Sleep; a cancellation ends it at once."""
    _note(path, number)
    try:
        await asyncio.sleep(seconds)
    finally:
        _note(path, number, "end")
    return number
