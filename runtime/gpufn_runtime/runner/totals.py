"""Totals of each function on this runner, for metrics: attempts, retries, starts. Pure.

A queue's counters start at zero when its revision gets workers here again. The totals never decrease, as Prometheus
requires of counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import ColdStart
from gpufn_core.protocol.reports import FunctionTotals, RevisionTraffic

MAX_FUNCTIONS: Final = 1_000  # beyond it, the function that changed least recently starts at zero again
_MAX_WORKERS: Final = 1_000


@dataclass
class _Counts:
    attempts: int = 0
    failed: int = 0
    retries: int = 0
    run_seconds: float = 0.0
    gpu_seconds: float = 0.0
    starts: int = 0
    resumes: int = 0
    failed_starts: int = 0
    phase_seconds: Counter[str] = field(default_factory=Counter)

    def add_traffic(self, now: RevisionTraffic, before: RevisionTraffic) -> None:
        self.attempts += now.ended - before.ended
        self.failed += now.failed - before.failed
        self.run_seconds += now.run_seconds - before.run_seconds
        self.gpu_seconds += now.gpu_seconds - before.gpu_seconds


class Totals:
    def __init__(self) -> None:
        self._last: dict[RevisionKey, RevisionTraffic] = {}
        self._counts: dict[str, _Counts] = {}
        self._counted: dict[str, None] = {}  # workers whose start was counted, in order

    def add_traffic(self, traffic: Iterable[RevisionTraffic]) -> None:
        """Add the counts of all queues since the last time."""
        current = {(each.function, each.revision): each for each in traffic}
        for key, now in current.items():
            before = self._last.get(key)
            if before is None or now.ended < before.ended:  # a new queue
                before = RevisionTraffic(now.function, now.revision)
            if now.ended > before.ended:
                self._of(now.function).add_traffic(now, before)
        self._last = current

    def add_retry(self, function: str) -> None:
        self._of(function).retries += 1

    def add_start(self, worker: str, function: str, start: ColdStart) -> None:
        """Add a cold start, or the resume of a parked worker."""
        counts = self._of(function)
        counts.phase_seconds.update({phase: seconds for phase, seconds in start.phases.items() if seconds > 0})
        if start.resume_s is not None:
            counts.resumes += 1
        else:
            counts.starts += 1
            self._remember(worker)

    def add_failed_start(self, worker: str, function: str) -> None:
        """Add a failed start. The runner reports it, and the agent the exit of the process: it counts once."""
        if worker not in self._counted:
            self._remember(worker)
            self._of(function).failed_starts += 1

    def report(self) -> tuple[FunctionTotals, ...]:
        return tuple(
            FunctionTotals(
                name, each.attempts, each.failed, each.retries, each.run_seconds, each.gpu_seconds, each.starts,
                each.resumes, each.failed_starts, dict(each.phase_seconds),
            )
            for name, each in self._counts.items()
        )  # fmt: skip

    def _of(self, function: str) -> _Counts:
        """Return the counts of a function, and move it to the end of the order of changes."""
        counts = self._counts.pop(function, None) or _Counts()
        self._counts[function] = counts
        if len(self._counts) > MAX_FUNCTIONS:
            del self._counts[next(iter(self._counts))]
        return counts

    def _remember(self, worker: str) -> None:
        self._counted[worker] = None
        if len(self._counted) > _MAX_WORKERS:
            del self._counted[next(iter(self._counted))]
