"""What the attempts of every call come to, whoever waits for it: by node and function, from what runners report. Pure.

A runner counts for a revision while that has workers on its node, and from nothing when it has some again, or when the
runner itself is a new one. Here the counts go on, as those who scrape them expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.protocol.reports import RevisionTraffic, RunnerReport


@dataclass
class AttemptCounts:
    """`failed` are those of `ended` that did not succeed; seconds are of all of them."""

    ended: int = 0
    failed: int = 0
    run_s: float = 0.0
    gpu_s: float = 0.0

    def add(self, now: RevisionTraffic, before: RevisionTraffic) -> None:
        self.ended += now.ended - before.ended
        self.failed += now.failed - before.failed
        self.run_s += now.run_seconds - before.run_seconds
        self.gpu_s += now.gpu_seconds - before.gpu_seconds


class Attempts:
    def __init__(self) -> None:
        # By node and runner: its successor may be heard before it is silent.
        self._last: dict[str, dict[str, dict[RevisionKey, RevisionTraffic]]] = {}
        self._counts: dict[tuple[str, str], AttemptCounts] = {}

    def take(self, report: RunnerReport) -> None:
        """Reports of one runner in their order."""
        runners = self._last.setdefault(report.node, {})
        known = runners.pop(report.runner, {})
        runners[report.runner] = told = {(each.function, each.revision): each for each in report.traffic}
        for gone in list(runners)[:-2]:
            del runners[gone]
        for key, now in told.items():
            before = known.get(key)
            if before is None or now.ended < before.ended:  # it counts anew
                before = RevisionTraffic(now.function, now.revision)
            if now.ended > before.ended:
                self._counts.setdefault((report.node, now.function), AttemptCounts()).add(now, before)

    def forget(self, function: str) -> None:
        for key in [key for key in self._counts if key[1] == function]:
            del self._counts[key]

    def __iter__(self) -> Iterator[tuple[str, str, AttemptCounts]]:
        """Node, function, and what they come to."""
        return ((node, function, counts) for (node, function), counts in self._counts.items())
