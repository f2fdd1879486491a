"""Files of parcels that nobody needs any more, kept by their writer to be written again.

Memory that a file has already is written in a third of the time that new memory takes, and need not be freed
(docs/decisions/0029).

A function may keep an array that lies in its input, and a client may still be reading an answer. So a file is written
again only when its writer's own name of it, which nobody was told, is the only one left, and nobody else has it open or
mapped. The kernel knows: only then does it grant a write lease (fcntl(2), F_SETLEASE). Two things it does not know:

- a descriptor that is a path only (O_PATH) and can be opened later: a file is written again only for readers that had
  it before
- a link under way, of a name that was there when it began: whoever links looks again (`Parcels.hand_on`)
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
_FREE_SHARE: Final = 1 / 4  # of what is free of the memory that they are in
_TRIES: Final = 8  # files in use are passed over


class _NoLeases(Exception):
    """Files of this kind know none."""


class _Spare(NamedTuple):
    name: str
    size: int
    readers: str


class Spares:
    """Those that one process has written in `folder`, whether they are in use or not: `most_bytes` of them. Beyond it
    those go that were not looked at for the longest time. Safe from all threads."""

    def __init__(self, folder: str, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._files: deque[_Spare] = deque()
        self._bytes = 0
        self._was_added = False
        self._lock = threading.Lock()

    @property
    def are_kept(self) -> bool:
        """Whether there can be any."""
        return self._most_bytes > 0

    def add(self, name: str, size: int, readers: str) -> None:
        """A file that was written for `readers`, by the name that nobody was told."""
        with self._lock:
            self._was_added = True
            most_bytes = min(self._most_bytes, _free_bytes(self._folder) * _FREE_SHARE)
            if size > most_bytes:
                self._remove(name)
                return
            self._files.append(_Spare(name, size, readers))
            self._bytes += size
            while self._bytes > most_bytes:
                self._drop_oldest()

    def take(self, readers: str) -> tuple[str, int] | None:
        """The name of a file of theirs that nobody needs, and the file, open for writing; as long as it was."""
        with self._lock:
            theirs = [spare for spare in self._files if spare.readers == readers]
            for spare in theirs[:_TRIES]:
                self._files.remove(spare)
                self._bytes -= spare.size
                try:
                    file = _claimed(os.path.join(self._folder, spare.name))
                except FileNotFoundError:
                    continue
                except _NoLeases:
                    self._most_bytes = 0
                    self._remove(spare.name)
                    self._drop_all()
                    break
                if file is not None:
                    return spare.name, file
                self._files.append(spare)
                self._bytes += spare.size
        return None

    def drop(self) -> bool:
        """All of them. Whether there was any."""
        with self._lock:
            had_any = bool(self._files)
            self._drop_all()
        return had_any

    def drop_unused(self) -> None:
        """All of them, if none was added since the last time."""
        if not self._was_added:
            self.drop()
        self._was_added = False

    def _drop_all(self) -> None:
        while self._files:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        spare = self._files.popleft()
        self._bytes -= spare.size
        self._remove(spare.name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, name))


def _free_bytes(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def _claimed(path: str) -> int | None:
    """The file, open for writing, when nobody else has it. Raises FileNotFoundError, _NoLeases."""
    try:
        # Not to wait, for up to a minute, for a reader that has leased it.
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:  # leased, or too many files are open
        return None
    is_ours = False
    try:
        if os.fstat(file).st_nlink == 1:
            # Whoever opens a leased file has its holder sent a signal: SIGIO, which ends a process, unless told else.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            is_ours = True
    except BlockingIOError:
        pass  # somebody has it open or mapped
    except OSError as error:
        raise _NoLeases from error
    finally:
        if not is_ours:
            os.close(file)
    return file if is_ours else None
