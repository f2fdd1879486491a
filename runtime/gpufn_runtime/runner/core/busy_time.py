"""Busy time of a worker, divided among its calls. Pure.

Calls that run concurrently in one worker share its GPU, so each second is divided among them. The calls' times add up
to the time in which the worker was busy.
"""

from __future__ import annotations


class BusyTime:
    """Busy time of one worker.

    >>> time = BusyTime()
    >>> first, second = time.begin(0.0), time.begin(1.0)
    >>> time.so_far(first, 2.0)
    1.5
    >>> time.end(first, 3.0), time.end(second, 4.0)
    (2.0, 2.0)
    """

    __slots__ = ("_running", "_share_s", "_updated_at")

    def __init__(self) -> None:
        self._running = 0
        self._updated_at = 0.0
        self._share_s = 0.0  # the time of a call that has run since the beginning

    def begin(self, now: float) -> float:
        """Return the value to pass to `end`. `now` is in monotonic seconds."""
        self._update(now)
        self._running += 1
        return self._share_s

    def end(self, share_at_begin: float, now: float) -> float:
        """Return the call's seconds."""
        self._update(now)
        self._running -= 1
        return self._share_s - share_at_begin

    def so_far(self, share_at_begin: float, now: float) -> float:
        """Return the seconds of a call that runs on."""
        return self._share_s + (now - self._updated_at) / self._running - share_at_begin

    def _update(self, now: float) -> None:
        if self._running:
            self._share_s += (now - self._updated_at) / self._running
        self._updated_at = now
