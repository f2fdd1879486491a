"""Clocks as arguments: loops take a Clock, pure code takes `now`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Monotonic seconds, for durations and windows."""
        ...

    def time(self) -> float:
        """Unix seconds, for deadlines and for records that travel between processes."""
        ...


class SystemClock:
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)
