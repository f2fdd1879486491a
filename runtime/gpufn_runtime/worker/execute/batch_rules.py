"""When calls that wait become a batch: pure, the time is passed in. The rule is `gpufn_core.spec.function_spec.Batch`'s."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from gpufn_core.spec.function_spec import Batch

T = TypeVar("T")


class Gathering(Generic[T]):
    """Calls by method, oldest first; at most `concurrency` batches run at once.

    >>> gathering = Gathering(Batch(max_size=2, max_wait_ms=5), concurrency=1)
    >>> gathering.add("", "a", now=0.0); gathering.take(now=0.0)
    ['a']
    >>> for call in "bcd": gathering.add("", call, now=0.001)
    >>> gathering.take(now=0.001) is None
    True
    >>> gathering.ended(); gathering.take(now=0.002)
    ['b', 'c']
    """

    def __init__(self, policy: Batch, concurrency: int) -> None:
        self._policy = policy
        self._concurrency = concurrency
        self._waiting: dict[str, deque[tuple[float, T]]] = {}
        self._running = 0
        self._one_ended = False

    def add(self, method: str, call: T, now: float) -> None:
        self._waiting.setdefault(method, deque()).append((now, call))

    def ended(self) -> None:
        """A batch that `take` gave has ended."""
        self._running -= 1
        self._one_ended = True

    def take(self, now: float) -> list[T] | None:
        """The batch that is due, if one is. Not due any more are calls that ended meanwhile: the caller skips them."""
        if self._running >= self._concurrency:
            return None
        at_once = self._running == 0 or self._one_ended
        due = [queue for queue in self._waiting.values() if queue and (at_once or self._is_due(queue, now))]
        self._one_ended = False
        if not due:
            return None
        queue = min(due, key=lambda queue: queue[0][0])
        self._running += 1
        return [queue.popleft()[1] for _ in range(min(len(queue), self._policy.max_size))]

    def due_at(self) -> float | None:
        """When to ask `take` again if nothing else happens; None when only an arrival or an end can matter."""
        oldest = [queue[0][0] for queue in self._waiting.values() if queue]
        if not oldest or self._running >= self._concurrency:
            return None
        return min(oldest) + self._policy.max_wait_ms / 1000

    def clear(self) -> None:
        self._waiting.clear()

    def _is_due(self, queue: deque[tuple[float, T]], now: float) -> bool:
        return len(queue) >= self._policy.max_size or now >= queue[0][0] + self._policy.max_wait_ms / 1000
