"""What an MPS daemon and its server log: how either may grow, and what they said last.

Nothing of NVIDIA's bounds these files, and each question to a daemon adds some lines: 15 MB a day on a GPU that is in
use. One that is too large is emptied where it lies. Its writer need not know: it goes on at the beginning or, if it
does not append, behind a hole, which takes no room on the disk.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

MOST_BYTES = 16 << 20  # on the disk, of each
_NAMES = ("control.log", "server.log")
_LAST_BYTES = 64 << 10
_LAST_LINES = 3
_BLOCK = 512  # of `st_blocks`
# What a daemon logs of each question that it is asked.
_OF_QUESTIONS = ("Accepting connection", "User did not send valid credentials", "NEW UI", "Cmd:", "UI closed")


def keep_small(folder: Path) -> None:
    """The folder is of the daemon's user, so a link that lies there is not followed."""
    for name in _NAMES:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_blocks * _BLOCK > MOST_BYTES:
                    os.ftruncate(descriptor, 0)
            finally:
                os.close(descriptor)


def last_words(folder: Path) -> str:
    """Where a driver says what it lacks: the daemon's own, and those of its server."""
    said = []
    for name in _NAMES:
        with contextlib.suppress(OSError):
            lines = _end_of(folder / name).splitlines()
            telling = [line for line in lines if not any(words in line for words in _OF_QUESTIONS)][-_LAST_LINES:]
            said += [f"{name}: {' | '.join(telling)}"] if telling else []
    return f": {'; '.join(said)}" if said else ""


def _end_of(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        return file.read(_LAST_BYTES).replace(b"\0", b"").decode(errors="replace")
