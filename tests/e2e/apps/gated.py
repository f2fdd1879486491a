"""A generator whose second item waits for a file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from gpufn import gpu_function


@gpu_function
def gated(gate: str) -> Iterator[str]:
    yield "first"
    while not Path(gate).exists():
        time.sleep(0.01)
    yield "second"
