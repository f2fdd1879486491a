"""How workers end with `gpufn up`, though an agent or a template is their parent and they outlive both.

The supervisor holds a FIFO open for writing. A worker opens it for reading and has the kernel send it SIGKILL when the
last writer is gone (F_SETSIG). So the kernel ends the worker as well when its user code holds the interpreter.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_F_SETSIG: Final = 10  # of Linux; the module `fcntl` does not name it


@contextlib.contextmanager
def held_open(path: Path) -> Iterator[None]:
    """Make the FIFO, and hold it open for writing: by this process alone, for children close it at exec."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    writer = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # for reading too: without a reader, open would wait for one
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(writer)


def end_with_supervisor(path: str) -> bool:
    """End this process, and the group that it leads, when the supervisor ends. False when it has ended already."""
    try:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # stays open as long as we live
    except FileNotFoundError:
        return False
    pid = os.getpid()
    fcntl.fcntl(reader, fcntl.F_SETOWN, -pid if os.getpgrp() == pid else pid)
    fcntl.fcntl(reader, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    try:
        os.read(reader, 1)
    except BlockingIOError:  # nobody ever writes; there is a writer
        return True
    return False
