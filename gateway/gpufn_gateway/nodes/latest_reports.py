"""The last report of each node, for as long as it says how things are now."""

from __future__ import annotations

from typing import Generic, TypeVar

from gpufn_platform.process.clock import Clock

T = TypeVar("T")


class Heard(Generic[T]):
    """Times are by our own clock. Hosts come back under new names: with one that is new, those that have gone go."""

    def __init__(self, clock: Clock, fresh_s: float) -> None:
        self._clock = clock
        self._fresh_s = fresh_s
        self._last: dict[str, tuple[float, T]] = {}  # heard at

    def take(self, node: str, report: T) -> None:
        if node not in self._last:
            self._last = {name: known for name, known in self._last.items() if self._is_fresh(known[0])}
        self._last[node] = self._clock.monotonic(), report

    def of(self, node: str) -> T | None:
        """None when it has not told lately."""
        known = self._last.get(node)
        return known[1] if known is not None and self._is_fresh(known[0]) else None

    def all(self) -> list[T]:
        """By the nodes' names."""
        return [report for _, (heard_at, report) in sorted(self._last.items()) if self._is_fresh(heard_at)]

    def _is_fresh(self, heard_at: float) -> bool:
        return self._clock.monotonic() - heard_at <= self._fresh_s
