"""Local backlog: short calls that wait for a busy slot of a Revision, so that the next call is here when a slot is
free. Pure.

A credit takes half a millisecond to become a delivery, as long as many a call runs. So once calls are known to be
short, the runner takes a few milliseconds' worth of calls more than it has free slots. When a call runs for long, the
backlog is closed and its calls return to their queue. Times are passed in.
"""

from __future__ import annotations

from collections import deque

from gpufn_runtime.runner.core.events import Arrived

SHORT_CALL_S = 0.02  # longer calls gain nothing from a backlog
LONG_RUNNING_S = 0.1  # calls in the backlog do not wait longer than this for a running call
_MAX_CALLS = 64
_MAX_BYTES = 16 << 20
_WEIGHT = 0.1  # weight of the newest call in the moving averages


class Backlog(deque[Arrived]):
    """Queue of waiting calls, oldest first. `is_closed` while a call runs for long.

    >>> backlog = Backlog()
    >>> backlog.max_length(at_once=1)
    0
    >>> for _ in range(10): backlog.ended(run_s=0.001, body_bytes=100)
    >>> backlog.max_length(at_once=1), backlog.max_length(at_once=8)
    (2, 20)
    >>> for _ in range(10): backlog.ended(run_s=0.1, body_bytes=100)
    >>> backlog.max_length(at_once=1)
    0
    """

    def __init__(self) -> None:
        super().__init__()
        self._mean_run_s = SHORT_CALL_S  # initial value
        self._mean_bytes = 0.0
        self.is_closed = False

    @property
    def is_short(self) -> bool:
        """Whether calls are so short that a backlog pays off."""
        return self._mean_run_s < SHORT_CALL_S and not self.is_closed

    def ended(self, run_s: float, body_bytes: int) -> None:
        """Record an ended call. `run_s` is its share of the run, if several calls ran together."""
        self._mean_run_s += _WEIGHT * (run_s - self._mean_run_s)
        self._mean_bytes += _WEIGHT * (body_bytes - self._mean_bytes)

    def max_length(self, at_once: int) -> int:
        """Return the maximum length, with which no call waits much longer than a short call, and memory is bounded.

        `at_once` is the number of concurrent runs."""
        if not self.is_short:
            return 0
        short_wait_calls = at_once * SHORT_CALL_S / max(self._mean_run_s, 1e-6)
        return int(min(_MAX_CALLS, short_wait_calls, _MAX_BYTES / max(self._mean_bytes, 1.0)))
