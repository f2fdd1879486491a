"""Lock files: a lock shows that a process lives, and the kernel releases it when the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_file(path: Path) -> int:
    """Create and lock a file until the returned descriptor is closed. Raises BlockingIOError if it is locked."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock. Raises OSError."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # works on a read-only disk
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
