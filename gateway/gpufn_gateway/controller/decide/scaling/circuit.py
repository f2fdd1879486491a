"""Circuit breaker for workers that fail to start. Pure.

    CLOSED ──3 failures in a row──▶ OPEN ──5, 10, 20 ... 300 s──▶ HALF_OPEN ──READY──▶ CLOSED
                                      ▲                              │
                                      └──────────a failure───────────┘

Each revision has its own circuit, so a new deploy starts with a closed one. HALF_OPEN lets one start through, and only
when a worker is wanted: calls must be admitted again by then, or no worker would ever be wanted. If a start takes the
place of a serving worker, one failure opens the circuit.
"""

from __future__ import annotations

import enum

from gpufn_core.errors import ErrorInfo, WorkerLost

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
        self.backoff_s = 0.0  # delay of the last opening
        self.openings = 0  # in a row: READY resets it
        self.last_error: ErrorInfo | None = None
        self._unexplained = ""  # the worker whose exit is all that `last_error` has

    def __repr__(self) -> str:
        return f"<Circuit [{self._failures} failures, {self.openings} openings]>"

    def state(self, now: float) -> CircuitState:
        if self.openings == 0:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now < self._open_until else CircuitState.HALF_OPEN

    def record_failure(self, now: float, error: ErrorInfo, *, took_a_place: bool = False, exited: str = "") -> None:
        """Record a worker that did not become ready. `took_a_place`: it replaced the last serving worker. `exited`: the
        worker, if only its exit is known."""
        self.last_error = error
        self._unexplained = exited
        self._failures += 1
        # Workers that were started together fail together: after the circuit has opened, their failures are no news.
        if self.state(now) is CircuitState.OPEN or (self._failures < FAILURES_TO_OPEN and not took_a_place):
            return
        self.backoff_s = min(max(FIRST_BACKOFF_S, 2 * self.backoff_s), LONGEST_BACKOFF_S)
        self._open_until = now + self.backoff_s
        self.openings += 1

    def record_explanation(self, worker: str, error: ErrorInfo) -> bool:
        """Replace the last failure's error with the worker's own report, which was later than its exit. Return False
        if the last failure is not the exit of this worker."""
        if not worker or worker != self._unexplained:
            return False
        if error.code != WorkerLost.code:  # that has fewer details than the exit
            self.last_error = error
        self._unexplained = ""
        return True

    def record_ready(self) -> None:
        self._failures = 0
        self.openings = 0
        self.backoff_s = 0.0
        self.last_error = None
        self._unexplained = ""

    def starts_allowed(self, now: float, wanted: int, starting: int) -> int:
        """Return how many of `wanted` further workers may be started while `starting` workers are starting."""
        match self.state(now):
            case CircuitState.CLOSED:
                return wanted
            case CircuitState.OPEN:
                return 0
            case CircuitState.HALF_OPEN:
                return min(wanted, max(0, 1 - starting))

    def retry_in_s(self, now: float) -> float:
        return max(0.0, self._open_until - now)
