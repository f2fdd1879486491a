"""Rate limit of a worker's output. Pure."""

from __future__ import annotations


class OutputLimit:
    """Token bucket: `rate` bytes a second on average, `burst` at once. Refused output is counted until `take_dropped`.

    >>> limit = OutputLimit(rate=10, burst=20, now=0.0)
    >>> [limit.admits(15, now=0.0), limit.admits(15, now=0.0), limit.admits(15, now=1.0)]
    [True, False, True]
    >>> limit.take_dropped()
    (1, 15)
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._updated_at = now
        self._lines = 0
        self._bytes = 0

    def admits(self, size: int, now: float) -> bool:
        self._tokens = min(self._burst, self._tokens + (now - self._updated_at) * self._rate)
        self._updated_at = now
        if size > self._tokens:
            self.drop(1, size)
            return False
        self._tokens -= size
        return True

    def drop(self, lines: int, size: int) -> None:
        self._lines += lines
        self._bytes += size

    def take_dropped(self) -> tuple[int, int]:
        """Return the lines and bytes refused since the previous call."""
        dropped = self._lines, self._bytes
        self._lines = self._bytes = 0
        return dropped
