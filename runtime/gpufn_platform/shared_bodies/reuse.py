"""Reuse of shared-memory files that no process needs any more.

Writing memory that a file already has takes a third of the time that new memory takes, and saves freeing it
(docs/decisions/0029).

A function may keep an array that lies in its input, and a client may still be reading a response. So a file is reused
only if its writer's private name is its last link, and no other process has it open or mapped. The kernel checks this:
it grants a write lease only then (fcntl(2), F_SETLEASE). Two cases escape that check:

- a path-only descriptor (O_PATH), which can be opened later: so a file is reused only for the same set of readers
- a concurrent link of a name that existed when the link began: the linking process checks again
  (`SharedBodies.link_into`)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections import deque
from typing import Final, NamedTuple

MAX_BYTES: Final = 64 << 20
_FREE_SHARE: Final = 1 / 4  # of the file system's free memory
_TRIES: Final = 8  # files to try; those in use are skipped


class _NoLeases(Exception):
    """The file system does not support leases."""


class _ReusableFile(NamedTuple):
    name: str
    size: int
    readers: str


class ReusableFiles:
    """Reusable files in `folder` that one process has written, whether in use or not, up to `most_bytes`. Beyond that
    the least recently tried files are dropped. Thread-safe."""

    def __init__(self, folder: str, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._files: deque[_ReusableFile] = deque()
        self._bytes = 0
        self._was_added = False
        self._lock = threading.Lock()

    @property
    def are_kept(self) -> bool:
        """Return whether reuse is enabled."""
        return self._most_bytes > 0

    def add(self, name: str, size: int, readers: str) -> None:
        """Add a file that was written for `readers`, by its private name."""
        with self._lock:
            self._was_added = True
            most_bytes = min(self._most_bytes, _free_bytes(self._folder) * _FREE_SHARE)
            if size > most_bytes:
                self._remove(name)
                return
            self._files.append(_ReusableFile(name, size, readers))
            self._bytes += size
            while self._bytes > most_bytes:
                self._drop_oldest()

    def take(self, readers: str) -> tuple[str, int] | None:
        """Claim an unused file of the same `readers`; returns its name and a descriptor open for writing, or None. The
        file keeps its old length."""
        with self._lock:
            candidates = [spare for spare in self._files if spare.readers == readers]
            for spare in candidates[:_TRIES]:
                self._files.remove(spare)
                self._bytes -= spare.size
                try:
                    file = _claim(os.path.join(self._folder, spare.name))
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
        """Drop all files. Returns whether there were any."""
        with self._lock:
            had_any = bool(self._files)
            self._drop_all()
        return had_any

    def drop_unused(self) -> None:
        """Drop all files if none was added since the previous call."""
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
        info = os.statvfs(folder)
    except OSError:
        return 0
    return info.f_bavail * info.f_frsize


def _claim(path: str) -> int | None:
    """Open a file for writing, or return None if another process has it. Raises FileNotFoundError, _NoLeases."""
    try:
        # O_NONBLOCK: otherwise this would wait up to a minute while another process has a lease.
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError:  # leased, or too many open files
        return None
    is_ours = False
    try:
        if os.fstat(file).st_nlink == 1:
            # Opening a leased file sends its holder a signal, by default SIGIO, which would end this process.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            is_ours = True
    except BlockingIOError:
        pass  # another process has it open or mapped
    except OSError as error:
        raise _NoLeases from error
    finally:
        if not is_ours:
            os.close(file)
    return file if is_ours else None
