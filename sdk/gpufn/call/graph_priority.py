"""The order in which the steps of a graph start: the step with the longest chain of dependents goes first.

The *rank* of a step is the cost of the longest chain that begins with it. With unlimited slots the order does not
matter. With few slots, this order takes at most twice as long as the best order (Graham 1966), and is usually the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence


def ranks(needs: Sequence[Collection[int]], costs: Sequence[float]) -> list[float]:
    """Return the rank of each step. `needs[n]` lists the steps that step n waits for; all of them come before it.

    >>> ranks([[], [], [0, 1], [0]], [2.0, 1.0, 4.0, 1.0])      # step 2 needs 0 and 1, step 3 needs 0
    [6.0, 5.0, 4.0, 1.0]
    """
    longest = [0.0] * len(needs)
    for step in reversed(range(len(needs))):
        longest[step] += costs[step]
        for need in needs[step]:
            if need >= step:
                raise ValueError(f"step {step} needs step {need}, which does not come before it")
            longest[need] = max(longest[need], longest[step])
    return longest


class Order:
    """The steps that may start now: the highest rank first, then the lowest number."""

    def __init__(self, needs: Sequence[Collection[int]], costs: Sequence[float]) -> None:
        self._ranks = ranks(needs, costs)
        self._unmet = [len(set(dependencies)) for dependencies in needs]  # the number of dependencies still to end
        self._dependents: list[list[int]] = [[] for _ in needs]
        for step, dependencies in enumerate(needs):
            for dependency in set(dependencies):
                self._dependents[dependency].append(step)
        self._ready = [(-self._ranks[step], step) for step, unmet in enumerate(self._unmet) if not unmet]
        heapq.heapify(self._ready)

    def take(self) -> int | None:
        """Return a step to start, or None if all remaining steps wait for others."""
        return heapq.heappop(self._ready)[1] if self._ready else None

    def mark_ended(self, step: int) -> None:
        """Mark a step as ended, so that its dependents may start."""
        for dependent in self._dependents[step]:
            self._unmet[dependent] -= 1
            if not self._unmet[dependent]:
                heapq.heappush(self._ready, (-self._ranks[dependent], dependent))
