"""Calls per second, errors and latencies of functions in the last minute, from the counters of the gateway.

`sample` reads the counters every two seconds and keeps the differences. So a function without calls costs two
comparisons, and no memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from gpufn_core.protocol.reports import FunctionTotals, TotalsReport
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.console.live.rates import IDLE, Rates, Totals, rates_of
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_platform.process.clock import Clock

WINDOW_S: Final = 60.0
STEP_S: Final = 2.0

_Changes = dict[str, Totals]


class Window:
    """`totals` returns the latest totals of each node's runner."""

    def __init__(self, telemetry: Telemetry, totals: Callable[[], Iterable[TotalsReport]]) -> None:
        self._telemetry = telemetry
        self._totals = totals
        self._attempts: dict[str, tuple[str, dict[str, FunctionTotals]]] = {}  # by node: the runner, and by function
        self._latencies: dict[str, tuple[float, list[int]]] = {}  # total seconds, and counts
        self._steps: deque[tuple[float, _Changes]] = deque()
        self._sums: _Changes = {}
        self._rates: dict[str, Rates] = {}
        self._since: float | None = None

    async def run(self, clock: Clock) -> None:
        """Read the counters every two seconds until cancelled."""
        while True:
            with log_failures("the rates of the console"):
                self.sample(clock.monotonic())
            await asyncio.sleep(STEP_S)

    def sample(self, now: float) -> None:
        """Read the counters at `now`, in monotonic seconds."""
        changes: _Changes = {}
        self._read_attempts(changes)
        self._read_latencies(changes)
        if self._since is None:
            self._since = now
            return
        self._steps.append((now, changes))
        for name, change in changes.items():
            self._sums.setdefault(name, Totals()).add(change)
        while self._steps[0][0] <= now - WINDOW_S:
            self._since, expired = self._steps.popleft()
            for name, change in expired.items():
                self._sums[name].add(change, -1)
                if self._sums[name].is_empty:
                    del self._sums[name]
        self._rates.clear()

    def of(self, name: str) -> Rates:
        if name not in self._sums:
            return IDLE
        rates = self._rates.get(name)
        if rates is None:
            rates = self._rates[name] = rates_of(self._sums[name], self._seconds())
        return rates

    def of_all(self, names: Iterable[str]) -> Rates:
        """Return the rates of several functions together."""
        total = Totals()
        for name in names:
            if (totals := self._sums.get(name)) is not None:
                total.add(totals)
        return rates_of(total, self._seconds())

    def _seconds(self) -> float:
        return self._steps[-1][0] - self._since if self._steps and self._since is not None else 0.0

    def _read_attempts(self, changes: _Changes) -> None:
        for report in self._totals():
            runner, before = self._attempts.get(report.node, ("", {}))
            current = {each.function: each for each in report.functions}
            self._attempts[report.node] = report.runner, current
            if runner != report.runner:  # its counters began before they were seen here
                continue
            for name, now in current.items():
                old = before.get(name, FunctionTotals(name))
                if now.attempts > old.attempts:  # else none ended, or the counters were reset
                    change = changes.setdefault(name, Totals())
                    change.ended += now.attempts - old.attempts
                    change.failed += now.failed - old.failed
                    change.run_s += now.run_seconds - old.run_seconds
                    change.gpu_s += now.gpu_seconds - old.gpu_seconds

    def _read_latencies(self, changes: _Changes) -> None:
        for name, latency in self._telemetry.latencies():
            total_s, counts = self._latencies.get(name, (0.0, ()))
            if latency.total == total_s:
                continue
            current = latency.classic()
            self._latencies[name] = latency.total, current
            if latency.total > total_s:
                change = changes.setdefault(name, Totals())
                change.add_latencies(current)
                change.add_latencies(counts, -1)
