"""Totals of all attempts by node and function, from the reports of the runners. Pure.

A runner's counters for a revision start at zero when the runner restarts, or when the revision gets workers on the node
again. The totals here never decrease, as Prometheus requires of counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.protocol.reports import RevisionTraffic, RunnerReport


@dataclass
class AttemptCounts:
    """`failed` counts the ended attempts that did not succeed. The seconds include all ended attempts."""

    ended: int = 0
    failed: int = 0
    run_s: float = 0.0
    gpu_s: float = 0.0

    def add(self, now: RevisionTraffic, before: RevisionTraffic) -> None:
        self.ended += now.ended - before.ended
        self.failed += now.failed - before.failed
        self.run_s += now.run_seconds - before.run_seconds
        self.gpu_s += now.gpu_seconds - before.gpu_seconds


class AttemptTotals:
    def __init__(self) -> None:
        # By node and runner: a new runner may report before the old one is silent.
        self._last: dict[str, dict[str, dict[RevisionKey, RevisionTraffic]]] = {}
        self._counts: dict[tuple[str, str], AttemptCounts] = {}

    def add_report(self, report: RunnerReport) -> None:
        """Add a report. The reports of one runner must come in order."""
        runners = self._last.setdefault(report.node, {})
        previous = runners.pop(report.runner, {})
        runners[report.runner] = current = {(each.function, each.revision): each for each in report.traffic}
        for runner in list(runners)[:-2]:
            del runners[runner]
        for key, now in current.items():
            before = previous.get(key)
            if before is None or now.ended < before.ended:  # its counter was reset
                before = RevisionTraffic(now.function, now.revision)
            if now.ended > before.ended:
                self._counts.setdefault((report.node, now.function), AttemptCounts()).add(now, before)

    def forget(self, function: str) -> None:
        for key in [key for key in self._counts if key[1] == function]:
            del self._counts[key]

    def __iter__(self) -> Iterator[tuple[str, str, AttemptCounts]]:
        """Yield node, function and totals."""
        return ((node, function, counts) for (node, function), counts in self._counts.items())
