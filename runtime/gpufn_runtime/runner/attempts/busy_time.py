"""What of a worker's time each of its calls took. Pure.

Calls that run in one worker at the same time share its GPU, so each second of it is divided among them: what they took
adds up to the time in which the worker had any.
"""

from __future__ import annotations


class BusyTime:
    """
    >>> time = BusyTime()
    >>> first, second = time.begin(0.0), time.begin(1.0)
    >>> time.end(first, 3.0), time.end(second, 4.0)
    (2.0, 2.0)
    """

    __slots__ = ("_at", "_each_s", "_running")

    def __init__(self) -> None:
        self._running = 0
        self._at = 0.0
        self._each_s = 0.0  # what one that had run all the time would have got

    def begin(self, now: float) -> float:
        """What `end` is to be told; `now` in monotonic seconds."""
        self._go_on(now)
        self._running += 1
        return self._each_s

    def end(self, begun: float, now: float) -> float:
        """Seconds that were this call's."""
        self._go_on(now)
        self._running -= 1
        return self._each_s - begun

    def _go_on(self, now: float) -> None:
        if self._running:
            self._each_s += (now - self._at) / self._running
        self._at = now
