"""Sliding windows over the last seconds: averages, rates and peaks by wall-clock time, whatever the loop's pace.

A sample of None means unknown. An unknown sample is skipped: it neither raises nor lowers a value. Ray counted loop
ticks instead of seconds, and a slow loop made its "30 seconds" longer; every method here takes `now`.
"""

from __future__ import annotations

from collections import deque


class Average:
    """The mean of a value over the last `span_s` seconds, one bucket per second.

    Every second has the same weight, however often it is sampled. None until `least` seconds were seen: a mean of few
    samples swings, and each swing starts a worker for nothing.
    """

    def __init__(self, span_s: float = 60.0, *, least: int = 10) -> None:
        self._span_s = span_s
        self._least = least
        self._buckets: deque[tuple[int, float, int]] = deque()  # second, sum, samples

    def record(self, now: float, value: float | None) -> None:
        if value is None:
            return
        second = int(now)
        if self._buckets and self._buckets[-1][0] == second:
            _, total, samples = self._buckets.pop()
            self._buckets.append((second, total + value, samples + 1))
        else:
            self._buckets.append((second, value, 1))
        self._forget(now)

    def at(self, now: float) -> float | None:
        self._forget(now)
        if len(self._buckets) < self._least:
            return None
        return sum(total / samples for _, total, samples in self._buckets) / len(self._buckets)

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= now - self._span_s:
            self._buckets.popleft()


class Rate:
    """The growth of a counter per second over the last `span_s` seconds. None until it was seen twice."""

    def __init__(self, span_s: float = 6.0) -> None:
        self._span_s = span_s
        self._samples: deque[tuple[float, float]] = deque()

    def record(self, now: float, total: float | None) -> None:
        if total is None:
            return
        self._samples.append((now, total))
        self._forget(now)

    def per_second(self, now: float) -> float | None:
        self._forget(now)
        if len(self._samples) < 2:
            return None
        return max(0.0, self._samples[-1][1] - self._samples[0][1]) / self._span_s

    def _forget(self, now: float) -> None:
        # The newest sample outside the window stays: it is the counter's value when the window began.
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._span_s:
            self._samples.popleft()
        if len(self._samples) == 1 and self._samples[0][0] < now - 2 * self._span_s:
            self._samples.clear()


class Peak:
    """The highest value of the last `span_s` seconds."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._falling: deque[tuple[float, int]] = deque()  # values that no later, higher value has superseded

    def record(self, now: float, value: int | None) -> None:
        if value is None:
            return
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now, value))

    def at(self, now: float) -> int | None:
        while self._falling and self._falling[0][0] < now - self._span_s:
            self._falling.popleft()
        return self._falling[0][1] if self._falling else None
