"""How much text a worker may send: pure, the time is passed in."""

from __future__ import annotations


class OutputLimit:
    """`rate` bytes a second on average, `burst` at once. What is refused is counted until `take_dropped`.

    >>> limit = OutputLimit(rate=10, burst=20, now=0.0)
    >>> [limit.admits(15, now=0.0), limit.admits(15, now=0.0), limit.admits(15, now=1.0)]
    [True, False, True]
    >>> limit.take_dropped()
    (1, 15)
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._at = now
        self._lines = 0
        self._bytes = 0

    def admits(self, size: int, now: float) -> bool:
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if size > self._left:
            self.drop(1, size)
            return False
        self._left -= size
        return True

    def drop(self, lines: int, size: int) -> None:
        self._lines += lines
        self._bytes += size

    def take_dropped(self) -> tuple[int, int]:
        """Lines and bytes refused since the last time."""
        dropped = self._lines, self._bytes
        self._lines = self._bytes = 0
        return dropped
