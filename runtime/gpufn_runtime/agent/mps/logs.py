"""Log files of MPS daemons and servers: size limit and last lines.

NVIDIA does not limit these files, and each command to a daemon adds lines: 15 MB a day on a GPU in use. A file that is
too large is truncated in place. Its writer continues at the beginning or, if it does not append, after a hole, which
needs no disk space.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 16 << 20  # disk usage per file
_NAMES = ("control.log", "server.log")
_LAST_BYTES = 64 << 10
_LAST_LINES = 3
_BLOCK = 512  # of `st_blocks`
# Lines that a daemon logs for each command.
_COMMAND_NOISE = ("Accepting connection", "User did not send valid credentials", "NEW UI", "Cmd:", "UI closed")


def keep_small(folder: Path) -> None:
    """Truncate large log files. The folder belongs to the daemon's user, so symbolic links in it are not followed."""
    for name in _NAMES:
        with contextlib.suppress(OSError), _regular_file(folder / name, os.O_WRONLY) as file:
            if os.fstat(file).st_blocks * _BLOCK > MAX_BYTES:
                os.ftruncate(file, 0)


def log_tail(folder: Path) -> str:
    """Return the last messages of daemon and server, which contain the driver's errors; "" if there are none."""
    parts = []
    for name in _NAMES:
        with contextlib.suppress(OSError):
            lines = _read_end(folder / name).splitlines()
            messages = [line for line in lines if not any(words in line for words in _COMMAND_NOISE)][-_LAST_LINES:]
            parts += [f"{name}: {' | '.join(messages)}"] if messages else []
    return f": {'; '.join(parts)}" if parts else ""


def _read_end(path: Path) -> str:
    with _regular_file(path, os.O_RDONLY) as file:
        end = os.pread(file, _LAST_BYTES, max(0, os.fstat(file).st_size - _LAST_BYTES))
        return end.replace(b"\0", b"").decode(errors="replace")


@contextlib.contextmanager
def _regular_file(path: Path, flags: int) -> Iterator[int]:
    """Open a log. MPS clients may write to its folder: a link could show any file, and a FIFO stop the agent. Raises
    OSError."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        yield file
    finally:
        os.close(file)
