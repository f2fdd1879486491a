"""End workers with `gpufn up`, although their parent is an agent or a template process and they outlive both.

The supervisor holds a FIFO open for writing. A worker opens it for reading and has the kernel send it SIGKILL when the
last writer closes it (F_SETSIG). So the kernel ends a worker even while user code blocks the interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_F_SETSIG: Final = 10  # Linux; the `fcntl` module has no name for it


@contextlib.contextmanager
def open_fifo(path: Path) -> Iterator[None]:
    """Create the FIFO and hold it open for writing. Only this process holds it: children close it at exec."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    writer = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # O_RDWR, because O_WRONLY would block until there is a reader
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(writer)


def end_with_supervisor(path: str, *, also_after_exec: bool = False) -> bool:
    """Kill this process, and the process group it leads, when the supervisor ends. False if it has already ended."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        reader = os.open(path, flags)  # stays open for the process's lifetime
        os.set_inheritable(reader, also_after_exec)
    except FileNotFoundError:
        return False
    pid = os.getpid()
    fcntl.fcntl(reader, fcntl.F_SETOWN, -pid if os.getpgrp() == pid else pid)
    fcntl.fcntl(reader, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    try:
        os.read(reader, 1)
    except BlockingIOError:  # no data, because nothing is ever written; but there is a writer
        return True
    return False
