"""Time as an argument. Loops take a Clock; pure code takes `now`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never jump: durations and windows."""
        ...

    def time(self) -> float:
        """Unix seconds: deadlines and records that travel between processes."""
        ...


class SystemClock:
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)
