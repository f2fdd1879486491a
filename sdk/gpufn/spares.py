"""Files of parcels that nobody needs any more, kept by their writer to be written again.

Memory that a file has already is written in a third of the time that new memory takes, and need not be freed
(docs/decisions/0030).

A function may keep an array that lies in its input, and a client may still be reading an answer. So a file is written
again only when its writer's own name of it, which nobody was told, is the only one left, and nobody else has it open or
mapped. The kernel knows: only then does it grant a write lease (fcntl(2), F_SETLEASE). It does not count a descriptor
that is a path only (O_PATH) and can be opened later, so a file is written again only for readers that had it before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections import deque
from typing import Final, NamedTuple

MOST_BYTES: Final = 64 << 20
_MOST_SHARE: Final = 1 / 16  # of the memory that all parcels of the host may take
_TRIES: Final = 8  # files in use are passed over


class _Spare(NamedTuple):
    name: str
    size: int
    readers: str


class Spares:
    """Those that one process has written in `folder`, whether they are in use or not: `most_bytes` of them, of which
    the oldest go first. Safe from all threads."""

    def __init__(self, folder: str, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._share_bytes: int | None = None  # as long as the folder was not there to ask
        self._files: deque[_Spare] = deque()
        self._bytes = 0
        self._was_taken = False
        self._lock = threading.Lock()

    def add(self, name: str, size: int, readers: str) -> None:
        """A file that was written for `readers`, by the name that nobody was told."""
        with self._lock:
            if self._share_bytes is None:
                self._share_bytes = _share_bytes(self._folder)
            self._files.append(_Spare(name, size, readers))
            self._bytes += size
            while self._bytes > min(self._most_bytes, self._share_bytes):
                self._drop_oldest()

    def take(self, readers: str) -> tuple[str, int] | None:
        """The name of a file of theirs that nobody needs, and the file, open for writing; as long as it was."""
        with self._lock:
            theirs = [spare for spare in self._files if spare.readers == readers]
            for spare in theirs[:_TRIES]:
                self._files.remove(spare)
                try:
                    file = _claimed(os.path.join(self._folder, spare.name))
                except FileNotFoundError:
                    self._bytes -= spare.size
                    continue
                if file is not None:
                    self._bytes -= spare.size
                    self._was_taken = True
                    return spare.name, file
                self._files.append(spare)
        return None

    def drop(self) -> bool:
        """All of them. Whether there was any."""
        with self._lock:
            had_any = bool(self._files)
            while self._files:
                self._drop_oldest()
        return had_any

    def drop_unused(self) -> None:
        """All of them, if none was taken since the last time."""
        if not self._was_taken:
            self.drop()
        self._was_taken = False

    def _drop_oldest(self) -> None:
        spare = self._files.popleft()
        self._bytes -= spare.size
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, spare.name))


def _share_bytes(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return int(found.f_blocks * found.f_frsize * _MOST_SHARE)


def _claimed(path: str) -> int | None:
    """The file, open for writing, when nobody else has it. Raises FileNotFoundError."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:  # too many open files
        return None
    try:
        if os.fstat(file).st_nlink == 1:
            # Whoever opens a leased file has its holder sent a signal: SIGIO, which ends a process, unless told else.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return file
    except OSError:
        pass  # somebody has it open or mapped, or files of this kind know no leases
    os.close(file)
    return None
