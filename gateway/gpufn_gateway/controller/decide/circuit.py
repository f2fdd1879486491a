"""When to stop starting workers that fail to start.

    CLOSED ──3 failures in a row──▶ OPEN ──5, 10, 20 ... 300 s──▶ HALF_OPEN ──READY──▶ CLOSED
                                      ▲                              │
                                      └──────────a failure───────────┘

Each revision has its own, so a new deploy starts with a clean one. HALF_OPEN lets one start through and only when
something asks for a worker: calls must be let in again then, or nothing would ever ask. Where a start takes the place
of a worker that served, one failure opens it.
"""

from __future__ import annotations

import enum

from gpufn_core.errors import ErrorInfo

FAILURES_TO_OPEN = 3
FIRST_BACKOFF_S = 5.0
LONGEST_BACKOFF_S = 300.0


class CircuitState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    def __init__(self) -> None:
        self._failures = 0
        self._open_until = 0.0
        self.backoff_s = 0.0  # for how long it was opened last
        self.openings = 0  # in a row: READY sets it back
        self.last_error: ErrorInfo | None = None

    def __repr__(self) -> str:
        return f"<Circuit [{self._failures} failures, {self.openings} openings]>"

    def state(self, now: float) -> CircuitState:
        if self.openings == 0:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self._open_until else CircuitState.HALF_OPEN

    def failed(self, now: float, error: ErrorInfo, *, took_a_place: bool = False) -> None:
        """A worker did not get ready. `took_a_place`: nobody serves calls while it is tried."""
        self.last_error = error
        self._failures += 1
        # Workers that were started together fail together: those after the one that opened it prove nothing new.
        if self.state(now) is CircuitState.OPEN or (self._failures < FAILURES_TO_OPEN and not took_a_place):
            return
        self.backoff_s = min(max(FIRST_BACKOFF_S, 2 * self.backoff_s), LONGEST_BACKOFF_S)
        self._open_until = now + self.backoff_s
        self.openings += 1

    def became_ready(self) -> None:
        self._failures = 0
        self.openings = 0
        self.backoff_s = 0.0
        self.last_error = None

    def starts_allowed(self, now: float, wanted: int, starting: int) -> int:
        """How many of `wanted` further workers may be started while `starting` are on their way."""
        match self.state(now):
            case CircuitState.CLOSED:
                return wanted
            case CircuitState.OPEN:
                return 0
            case CircuitState.HALF_OPEN:
                return min(wanted, max(0, 1 - starting))

    def retry_in_s(self, now: float) -> float:
        return max(0.0, self._open_until - now)
