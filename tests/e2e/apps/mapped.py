"""Functions for many items: each run of `noted` is a line in a file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from gpufn import gpu_function


@gpu_function(max_workers=1, concurrency=8, idle_timeout=60)
def noted(path: str, number: int) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{number}\n".encode())
    os.close(descriptor)
    return number


@gpu_function(max_workers=1, concurrency=8, idle_timeout=60)
def choosy(number: int) -> int:
    if number % 10 == 3:
        raise ValueError(f"{number} is not liked")
    return number


@gpu_function(max_workers=1, idle_timeout=60)
async def slow(number: int) -> int:
    await asyncio.sleep(30 if number else 0)
    return number


@gpu_function(max_workers=1, idle_timeout=60)
def large(number: int) -> bytes:
    return bytes([number]) * ((2 << 20) if number % 2 else 10)


@gpu_function(max_workers=1, idle_timeout=60)
def upto(number: int) -> Iterator[int]:
    yield from range(number)
