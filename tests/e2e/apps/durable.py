"""Functions whose side effects are counted: each run of `count` is one line in a file."""

from __future__ import annotations

import os
import time

from gpufn import Retry, gpu_function


def _note(path: str, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


@gpu_function(max_workers=2, idle_timeout=60, retries=Retry(20, delay_s=0.05, backoff=1.0))
def count(path: str, number: int) -> int:
    _note(path, str(number))
    return number


@gpu_function(max_workers=1, idle_timeout=60)
def sleeper(path: str, seconds: float) -> str:
    """Sleep in one C call, which cannot be interrupted."""
    _note(path, "began")
    time.sleep(seconds)
    _note(path, "ended")
    return "slept"


@gpu_function(max_workers=1, idle_timeout=60)
def held(path: str, gate: str) -> None:
    """Run until a file exists."""
    _note(path, "began")
    while not os.path.exists(gate):
        time.sleep(0.01)


@gpu_function(max_workers=1, idle_timeout=60)
def picky(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is below 0")
    return number


@gpu_function(max_workers=1, idle_timeout=60)
def large(size: int) -> bytes:
    return bytes(range(256)) * (size // 256)
