"""The latest report of each node, while it is fresh."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from gpufn_platform.process.clock import Clock


class _Report(Protocol):
    @property
    def node(self) -> str: ...


T = TypeVar("T", bound=_Report)


class LatestReports(Generic[T]):
    """Times are by our own clock. Hosts come back under new names, so a new name triggers the removal of stale ones."""

    def __init__(self, clock: Clock, fresh_s: float) -> None:
        self._clock = clock
        self._fresh_s = fresh_s
        self._last: dict[str, tuple[float, T]] = {}  # node -> (received_at, report)

    def put(self, report: T) -> None:
        node = report.node
        if node not in self._last:
            self._last = {name: entry for name, entry in self._last.items() if self._is_fresh(entry[0])}
        self._last[node] = self._clock.monotonic(), report

    def get(self, node: str) -> T | None:
        """Return the report of a node; None without a recent one."""
        entry = self._last.get(node)
        return entry[1] if entry is not None and self._is_fresh(entry[0]) else None

    def all(self) -> list[T]:
        """Return the fresh reports, ordered by node name."""
        return [report for _, (received_at, report) in sorted(self._last.items()) if self._is_fresh(received_at)]

    def _is_fresh(self, received_at: float) -> bool:
        return self._clock.monotonic() - received_at <= self._fresh_s
