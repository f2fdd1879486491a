"""The end of a child process: its result file, and the meaning of its exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from pathlib import Path
from typing import Final

from gpufn_core.spec.units import format_bytes

_LARGEST_RESULT: Final = 64 << 20
_CRASHES: Final = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)  # C libraries end so when they get no memory
_OUT_OF_MEMORY: Final = ("MemoryError", "bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory")


def read_result(path: Path) -> bytes:
    """Read a result file. Raises OSError if it is not a regular file or too large."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_RESULT:
            raise OSError(errno.EINVAL, "not a result")
        return file.read()


def describe_exit(code: int, output: str, memory_limit_bytes: int | None) -> str:
    limit = None
    if memory_limit_bytes is not None:
        limit = f"needs more memory than its limit of {format_bytes(memory_limit_bytes)}"
    if limit is not None and any(words in output for words in _OUT_OF_MEMORY):
        return limit
    if code < 0:
        with contextlib.suppress(ValueError):
            killed = f"was killed by {signal.Signals(-code).name}"
            if -code in _CRASHES and memory_limit_bytes is not None:
                return (
                    f"{killed}: it crashed, or needs more memory than its limit of {format_bytes(memory_limit_bytes)}"
                )
            return killed
    last = output.rpartition("\n")[2].strip()
    return f"ended with code {code}" + (f": {last[:300]}" if last else "")
