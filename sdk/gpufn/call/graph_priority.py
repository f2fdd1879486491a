"""Which step of a graph to start next: the one with the longest way to the end.

The *rank* of a step is the cost of the longest chain that begins with it; a step that much waits for should not wait
itself. With as many slots as one likes the order does not matter; with few, this one is never worse than twice the best
(Graham 1966), and mostly the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence


def ranks(needs: Sequence[Collection[int]], costs: Sequence[float]) -> list[float]:
    """`needs[n]` are the steps that step n waits for, all of them before it.

    >>> ranks([[], [], [0, 1], [0]], [2.0, 1.0, 4.0, 1.0])      # 0 and 1, then 2; 3 needs 0 alone
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
    """What may start now, the highest rank first; among equals the one that was written first."""

    def __init__(self, needs: Sequence[Collection[int]], costs: Sequence[float]) -> None:
        self._ranks = ranks(needs, costs)
        self._lacking = [len(set(each)) for each in needs]
        self._followers: list[list[int]] = [[] for _ in needs]
        for step, each in enumerate(needs):
            for need in set(each):
                self._followers[need].append(step)
        self._ready = [(-self._ranks[step], step) for step, lacking in enumerate(self._lacking) if not lacking]
        heapq.heapify(self._ready)

    def take(self) -> int | None:
        """A step to start; None while all that is left waits for others."""
        return heapq.heappop(self._ready)[1] if self._ready else None

    def ended(self, step: int) -> None:
        for follower in self._followers[step]:
            self._lacking[follower] -= 1
            if not self._lacking[follower]:
                heapq.heappush(self._ready, (-self._ranks[follower], follower))
