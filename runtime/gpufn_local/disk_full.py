"""Detection of a full disk under nats-server, and of the moment when there is space again.

nats-server remembers the error of its first failed write. That stream stores nothing until the server is restarted,
even when there is space again, and publishers to it get no reply. Only the server's log shows this. So, each second:

1. read the new part of the log and look for a write that failed for lack of space
2. report once that the disk is full
3. when there is space again, request a restart of the server
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

_WRITE_FAILED = b"no space left on device"
_MAX_READ = 1 << 20  # bytes of the log per check
_ENOUGH_BYTES = 16 << 20  # of free space, or a tenth of a small disk; with less, the server would soon fail again


class StoreWatch:
    """Watches the nats-server with its data in `folder` and its log at `log`. `usage` returns total, used and free
    bytes."""

    def __init__(
        self,
        folder: Path,
        log: Path,
        say: Callable[[str], None],
        *,
        usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage,
    ) -> None:
        self._folder = folder
        self._log = log
        self._say = say
        self._usage = usage
        self.started()

    def started(self) -> None:
        """Ignore the log up to now, which belongs to earlier servers."""
        self._read_to = self._log.stat().st_size if self._log.exists() else 0
        self._is_stuck = False

    def must_restart(self) -> bool:
        """Whether the server has stopped storing although there is space."""
        was_stuck, self._is_stuck = self._is_stuck, self._is_stuck or self._has_failed()
        if not self._is_stuck:
            return False
        total, _, free = self._usage(self._folder)
        has_space = free >= min(_ENOUGH_BYTES, total // 10)
        if has_space:
            self._say(f"the disk of {self._folder} has space again: restarting nats-server so that it stores again")
        elif not was_stuck:
            self._say(
                f"the disk of {self._folder} is full: no deploys, submitted calls or new workers until there is space"
            )
        return has_space

    def _has_failed(self) -> bool:
        try:
            with self._log.open("rb") as log:
                log.seek(self._read_to)
                text = log.read(_MAX_READ)
        except OSError:
            return False
        # The log may end in the middle of a line, so its end is read again with the next part.
        self._read_to += max(len(text) - len(_WRITE_FAILED), 0)
        return _WRITE_FAILED in text
