"""A disk that got full under nats-server, and the moment when there is room again.

nats-server keeps the error of its first failed write: that stream stores nothing more, room or not, until the server
is started again, and who publishes to it gets no answer at all. Only its log tells. So, each second:

1. read what is new in the log: a write failed for want of room
2. say so once, while there is none
3. with room again: it has to be started again
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

_WROTE_NOTHING = b"no space left on device"
_MOST_READ = 1 << 20  # of the log, per look
_ENOUGH_BYTES = 16 << 20  # of room, or a tenth of a small disk: a restart for the next few calls would be one of many


class StoreWatch:
    """Of the nats-server whose data is in `folder` and whose log is `log`; `usage` tells (total, used, free) bytes."""

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
        """The server is being started: what its log says so far is of those before."""
        self._read_to = self._log.stat().st_size if self._log.exists() else 0
        self._is_stuck = False

    def must_restart(self) -> bool:
        """Whether it can store again, and does not."""
        was_stuck, self._is_stuck = self._is_stuck, self._is_stuck or self._has_failed()
        if not self._is_stuck:
            return False
        total, _, free = self._usage(self._folder)
        has_room = free >= min(_ENOUGH_BYTES, total // 10)
        if has_room:
            self._say(f"the disk of {self._folder} has room again: nats-server starts again, to store again")
        elif not was_stuck:
            self._say(
                f"the disk of {self._folder} is full: no deploy, submitted call or new worker until there is room"
            )
        return has_room

    def _has_failed(self) -> bool:
        try:
            with self._log.open("rb") as log:
                log.seek(self._read_to)
                news = log.read(_MOST_READ)
        except OSError:
            return False
        # A line may be half written: its words are looked for again with what follows.
        self._read_to += max(len(news) - len(_WROTE_NOTHING), 0)
        return _WROTE_NOTHING in news
