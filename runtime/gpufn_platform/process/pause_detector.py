"""The beats of what is looked at now and then, and the pauses in which we ourselves stood still. Pure.

A machine is suspended, a process is stopped and goes on, a loop is held up. Time has passed then for everybody, but
what others sent meanwhile has not been read: the first look would find them all silent. (A loop runs its timers before
it reads, uvloop's as well as asyncio's.)

>>> beats = Beats(now=0.0)
>>> beats.next(0.1), beats.next(0.2), beats.next(60.0), beats.next(60.1)
(1, 2, None, 3)
"""

from __future__ import annotations

from typing import Final

_PAUSE_S: Final = 2.0  # less than whatever anybody may be silent for


class Beats:
    def __init__(self, now: float) -> None:
        self._at = now
        self._number = 0
        self._was_pause = False

    def next(self, now: float) -> int | None:
        """Its number, from 1; None for one that is left out, because it is the first after a pause. Never two in a row:
        where every beat comes late, it is the machine that is slow."""
        self._was_pause = now - self._at > _PAUSE_S and not self._was_pause
        self._at = now
        if self._was_pause:
            return None
        self._number += 1
        return self._number
