"""Functions that clients call through a proxy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from gpufn import gpu_function


@gpu_function(max_workers=1, idle_timeout=60)
def backwards(data: bytes) -> bytes:
    return data[::-1]


@gpu_function(max_workers=1, idle_timeout=60)
def two_items(gate: str) -> Iterator[str]:
    """The second item waits for a file."""
    yield "first"
    while not Path(gate).exists():
        time.sleep(0.02)
    yield "second"
