"""The line: short calls that stand behind the busy slots of a Revision, so that one is here when a slot is free.

A credit takes half a millisecond to become a delivery: as long as many a call. So once calls are known to be short, a
runner takes a few milliseconds' worth of them more than it has free slots. When one turns out to last, the line is
closed, and who stands in it is handed back. Times are passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from gpufn_core.protocol.messages import InvocationMessage
from gpufn_platform.queue.delivery import Delivery
from gpufn_runtime.runner.dispatch.fast_path import DirectDelivery

SHORT_CALL_S = 0.02  # longer ones gain nothing
LASTS_S = 0.1  # so long the calls in line do not wait for one that runs
_LONGEST = 64
_MOST_BYTES = 16 << 20
_WEIGHT = 0.1  # of the newest call in the means


class Waiting(NamedTuple):
    delivery: Delivery | DirectDelivery
    message: InvocationMessage
    body: bytes


class Line:
    """Oldest first. `is_closed` while a call lasts.

    >>> line = Line()
    >>> line.longest(at_once=1)
    0
    >>> for _ in range(10): line.ended(run_s=0.001, body_bytes=100)
    >>> line.longest(at_once=1), line.longest(at_once=8)
    (2, 20)
    >>> for _ in range(10): line.ended(run_s=0.1, body_bytes=100)
    >>> line.longest(at_once=1)
    0
    """

    def __init__(self) -> None:
        self._calls: deque[Waiting] = deque()
        self._mean_run_s = SHORT_CALL_S  # as long as nothing is known
        self._mean_bytes = 0.0
        self.is_closed = False

    @property
    def is_short(self) -> bool:
        """Calls take so little time that it pays to have the next one here."""
        return self._mean_run_s < SHORT_CALL_S and not self.is_closed

    def ended(self, run_s: float, body_bytes: int) -> None:
        """A call ended; `run_s` is its share of the run, when several had one together."""
        self._mean_run_s += _WEIGHT * (run_s - self._mean_run_s)
        self._mean_bytes += _WEIGHT * (body_bytes - self._mean_bytes)

    def longest(self, at_once: int) -> int:
        """So many may stand in line that none does so for much longer than a short call, nor all of them are large.

        `at_once` runs go on at a time."""
        if not self.is_short:
            return 0
        in_time = at_once * SHORT_CALL_S / max(self._mean_run_s, 1e-6)
        return int(min(_LONGEST, in_time, _MOST_BYTES / max(self._mean_bytes, 1.0)))

    def append(self, waiting: Waiting) -> None:
        self._calls.append(waiting)

    def next(self) -> Waiting:
        return self._calls.popleft()

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._calls)
