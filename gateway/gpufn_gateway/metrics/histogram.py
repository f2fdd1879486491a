"""A histogram of seconds in the classic buckets and in the native ones of Prometheus, and the calls that its exemplars
name.

The bounds of both kinds of buckets divide the durations into cells. An observation counts in one cell, which lies in
one classic bucket and in one native bucket.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import Final, NamedTuple

from gpufn_core.domain.trace_context import is_traced, keeps, traceparent

# Seconds, upper bounds.
BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

# Native buckets grow by 2 ** (2 ** -SCHEMA), which is 9 %. The upper bound of number n is 2 ** (n * 2 ** -SCHEMA).
SCHEMA: Final = 3
_FIRST, _LAST = -17 << SCHEMA, 17 << SCHEMA  # 7.6 µs to 36 hours; longer durations count in the last bucket
ZERO_THRESHOLD: Final = 2.0**-17  # seconds; durations up to it are in the zero bucket
_NATIVE_BOUNDS: Final = tuple(2.0 ** (number / (1 << SCHEMA)) for number in range(_FIRST, _LAST))

_CELL_BOUNDS: Final = tuple(sorted({*BOUNDS, *_NATIVE_BOUNDS}))
_CLASSIC_OF: Final = tuple(bisect_left(BOUNDS, bound) for bound in (*_CELL_BOUNDS, float("inf")))
_NATIVE_OF: Final = tuple(_FIRST + bisect_left(_NATIVE_BOUNDS, bound) for bound in (*_CELL_BOUNDS, float("inf")))


class Exemplar(NamedTuple):
    """A call in a bucket. All its labels together may have 128 characters."""

    labels: tuple[tuple[str, str], ...]
    seconds: float
    at: float  # unix seconds


# A call that an exemplar names: its id, the caller's `traceparent` or "", its seconds, when it ended in unix seconds.
Traced = tuple[str, str, float, float]
_MAX_ID_CHARS: Final = 50  # beside 63 of the other labels


class Histogram:
    __slots__ = ("cells", "total")

    def __init__(self) -> None:
        self.cells: dict[int, int] = {}
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self.cells.values())

    def copy(self) -> Histogram:
        twin = Histogram()
        twin.cells, twin.total = self.cells.copy(), self.total
        return twin

    def add(self, other: Histogram) -> None:
        for cell, count in other.cells.items():
            self.cells[cell] = self.cells.get(cell, 0) + count
        self.total += other.total

    def observe(self, seconds: float) -> int:
        """Count a value, and return the number of its classic bucket."""
        cell = bisect_left(_CELL_BOUNDS, seconds)
        self.cells[cell] = self.cells.get(cell, 0) + 1
        self.total += seconds
        return _CLASSIC_OF[cell]

    def classic(self) -> list[int]:
        """Return the counts of the classic buckets; the last one has no bound.

        >>> histogram = Histogram()
        >>> [histogram.observe(seconds) for seconds in (0.0, 0.001, 0.0011, 400.0)]
        [0, 0, 1, 16]
        >>> histogram.classic()
        [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
        """
        counts = [0] * (len(BOUNDS) + 1)
        for cell, count in self.cells.items():
            counts[_CLASSIC_OF[cell]] += count
        return counts

    def cumulative(self) -> list[int]:
        return list(itertools.accumulate(self.classic()))

    def native(self) -> tuple[int, dict[int, int]]:
        """Return the count of the zero bucket, and of the other native buckets by their number, in order.

        >>> histogram = Histogram()
        >>> [histogram.observe(seconds) for seconds in (0.0, 1.0, 1.01, 0.99, 1e9)]
        [0, 9, 10, 9, 16]
        >>> histogram.native()
        (1, {0: 2, 1: 1, 136: 1})
        """
        counts: dict[int, int] = {}
        for cell, count in sorted(self.cells.items()):
            number = _NATIVE_OF[cell]
            counts[number] = counts.get(number, 0) + count
        return counts.pop(_FIRST, 0), counts


def exemplar_of(invocation: str, trace: str, seconds: float, at: float) -> Exemplar:
    labels = (("invocation", invocation[:_MAX_ID_CHARS]),)
    if trace and (not is_traced(trace) or keeps(trace, is_error=False, took_s=seconds)):  # else there are no spans
        _, trace_id, span_id, _ = traceparent(invocation, trace).split("-")
        return Exemplar((*labels, ("trace_id", trace_id), ("span_id", span_id)), seconds, at)
    return Exemplar(labels, seconds, at)
