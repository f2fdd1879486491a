"""A function with one slot that records its calls in order, as lines in a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gpufn import gpu_function


@gpu_function(max_workers=1, idle_timeout=60)
def note(path: str, word: str) -> str:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{word}\n".encode())
    os.close(descriptor)
    while word == "gate" and not Path(f"{path}.open").exists():
        time.sleep(0.01)
    return word
