"""Functions that take and return large bodies."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from gpufn import gpu_function

_MIB = 1 << 20


@gpu_function(max_workers=2, idle_timeout=60, memory="2Gi")
def turned(data: bytes) -> bytes:
    return data[::-1]


@gpu_function(max_workers=1, idle_timeout=60)
def held(data: bytes) -> str:
    """Wait until the file exists whose path is the first line."""
    path = Path(data[:1024].partition(b"\n")[0].decode())
    while not path.exists():
        time.sleep(0.02)
    return digest(data)


@gpu_function(max_workers=1, idle_timeout=60, memory="2Gi", timeout=120)
def asks(size: int, count: int) -> dict[str, Any]:
    """Calls `turned` in each way that a function can."""
    data = pattern(size)
    wanted = digest(data[::-1])
    submitted = turned.spawn(data)
    return {
        "remote": digest(turned.remote(data)) == wanted,
        "spawn": digest(submitted.result(timeout=60)) == wanted,
        "map": [digest(each) == wanted for each in turned.map([data] * count)],
    }


def pattern(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + b"." * (size % 251)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
