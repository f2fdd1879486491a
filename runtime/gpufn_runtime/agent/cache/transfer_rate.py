"""The rate of the transfers of one fetch. Pure."""

from __future__ import annotations

from typing import Final

_LEAST_BYTES: Final = 64 << 20  # with fewer, the latency of requests takes most of the time


class TransferRate:
    """The bytes of transfers, and the seconds in which at least one ran: waits for room or other fetches do not count.

    >>> rate = TransferRate()
    >>> rate.begin(now=10.0); rate.begin(now=11.0); rate.end(now=12.0, received=64 << 20); rate.bytes_per_s
    >>> rate.end(now=12.0, received=64 << 20); rate.bytes_per_s == (64 << 20)
    True
    """

    def __init__(self) -> None:
        self._bytes = self._running = 0
        self._seconds = self._since = 0.0

    def begin(self, now: float) -> None:
        if not self._running:
            self._since = now
        self._running += 1

    def end(self, now: float, received: int) -> None:
        self._bytes += received
        self._running -= 1
        if not self._running:
            self._seconds += now - self._since

    @property
    def bytes_per_s(self) -> float | None:
        """None while a transfer runs, or if there were too few bytes for a rate."""
        if self._running or self._bytes < _LEAST_BYTES or self._seconds <= 0:
            return None
        return self._bytes / self._seconds
