"""Decide when waiting calls become a batch, by the rule of `gpufn_core.spec.function_spec.Batch`. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

from gpufn_core.spec.function_spec import Batch

T = TypeVar("T")


class Gathering(Generic[T]):
    """Waiting calls by method, oldest first. `batches` are the rules of the methods. At most `concurrency` batches run
    at once.

    >>> gathering = Gathering({"": Batch(max_size=2, max_wait_ms=5)}, concurrency=1)
    >>> gathering.add("", "a", now=0.0); gathering.take(now=0.0)
    ['a']
    >>> for call in "bcd": gathering.add("", call, now=0.001)
    >>> gathering.take(now=0.001) is None
    True
    >>> gathering.ended(); gathering.take(now=0.002)
    ['b', 'c']
    """

    def __init__(self, batches: Mapping[str, Batch], concurrency: int) -> None:
        self._batches = batches
        self._concurrency = concurrency
        self._waiting: dict[str, deque[tuple[float, T]]] = {}
        self._running = 0
        self._has_ended = False

    def add(self, method: str, call: T, now: float) -> None:
        self._waiting.setdefault(method, deque()).append((now, call))

    def ended(self) -> None:
        """Report that a batch returned by `take` has ended."""
        self._running -= 1
        self._has_ended = True

    def take(self, now: float) -> list[T] | None:
        """Return the batch that is due, or None. Calls in it may have ended meanwhile: the caller must skip them."""
        if self._running >= self._concurrency:
            return None
        is_immediate = self._running == 0 or self._has_ended
        waiting = [(queue, self._batches[name]) for name, queue in self._waiting.items() if queue]
        due = [each for each in waiting if is_immediate or self._is_due(*each, now)]
        self._has_ended = False
        if not due:
            return None
        queue, batch = min(due, key=lambda each: each[0][0][0])
        self._running += 1
        return [queue.popleft()[1] for _ in range(min(len(queue), batch.max_size))]

    def due_at(self) -> float | None:
        """Return when to call `take` again if nothing else happens, or None if only an arrival or an end matters."""
        if self._running >= self._concurrency:
            return None
        due = (queue[0][0] + self._batches[name].max_wait_ms / 1000 for name, queue in self._waiting.items() if queue)
        return min(due, default=None)

    def _is_due(self, queue: deque[tuple[float, T]], batch: Batch, now: float) -> bool:
        return len(queue) >= batch.max_size or now >= queue[0][0] + batch.max_wait_ms / 1000
