"""Functions that record their progress in a file, for callers that leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from gpufn import gpu_function


@gpu_function(max_workers=1, timeout=120)
def notes(path: str, seconds: float = 0.0) -> str:
    """Record the start, and the end unless the call is cancelled."""
    with Path(path).open("a") as file:
        file.write("began\n")
    time.sleep(seconds)
    with Path(path).open("a") as file:
        file.write("ended\n")
    return "done"


@gpu_function(max_workers=1, timeout=120)
def counts(path: str, size: int = 0) -> Iterator[str]:
    """Counts for ever, in items of `size` characters, and says when it is closed."""
    number = 0
    try:
        while True:
            yield f"{number}".ljust(size)
            number += 1
    finally:
        Path(path).write_text(f"closed at {number}")
