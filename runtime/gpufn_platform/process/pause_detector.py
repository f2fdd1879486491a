"""Detect pauses of this process in a periodic check. Pure.

A machine is suspended, a process is stopped and resumed, an event loop is blocked. Time passes, but messages that
arrived meanwhile are unread: the first check after the pause would consider every peer silent. (An event loop runs its
timers before it reads sockets, in uvloop and in asyncio.)

>>> beats = PauseDetector(now=0.0)
>>> beats.next(0.1), beats.next(0.2), beats.next(60.0), beats.next(60.1)
(1, 2, None, 3)
"""

from __future__ import annotations

from typing import Final

_PAUSE_S: Final = 2.0  # shorter than every silence timeout


class PauseDetector:
    def __init__(self, now: float) -> None:
        self._at = now
        self._number = 0
        self._was_pause = False

    def next(self, now: float) -> int | None:
        """Return the number of this beat, from 1. None for the first beat after a pause, which the caller must skip.

        Never None twice in a row: if every beat is late, the machine is just slow."""
        self._was_pause = now - self._at > _PAUSE_S and not self._was_pause
        self._at = now
        if self._was_pause:
            return None
        self._number += 1
        return self._number
