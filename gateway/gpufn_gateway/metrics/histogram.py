"""A histogram of seconds, and the calls that its exemplars name."""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from typing import Final, NamedTuple

from gpufn_core.domain.trace_context import is_traced, keeps, traceparent

# Seconds, upper bounds.
BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_NAMES: Final = (*map(str, BOUNDS), "+Inf")


class Exemplar(NamedTuple):
    """A call in a bucket. All its labels together may have 128 characters."""

    labels: tuple[tuple[str, str], ...]
    seconds: float
    at: float  # unix seconds


Bucket = tuple[str, float, Exemplar | None]  # upper bound, cumulative count
# A call that an exemplar names: its id, the caller's `traceparent` or "", its seconds, when it ended in unix seconds.
Traced = tuple[str, str, float, float]
_MAX_ID_CHARS: Final = 50  # beside 63 of the other labels


class Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def copy(self) -> Histogram:
        twin = Histogram()
        twin.counts, twin.total = self.counts.copy(), self.total
        return twin

    def add(self, other: Histogram) -> None:
        self.counts = list(map(operator.add, self.counts, other.counts))
        self.total += other.total

    def observe(self, seconds: float) -> int:
        """Count a value, and return the number of its bucket."""
        bucket = bisect_left(BOUNDS, seconds)
        self.counts[bucket] += 1
        self.total += seconds
        return bucket

    def cumulative(self, exemplars: dict[int, Traced] | None = None) -> list[Bucket]:
        traced = exemplars or {}
        return [
            (name, count, _exemplar(*traced[number]) if number in traced else None)
            for number, (name, count) in enumerate(zip(_NAMES, itertools.accumulate(self.counts), strict=True))
        ]


def _exemplar(invocation: str, trace: str, seconds: float, at: float) -> Exemplar:
    labels = (("invocation", invocation[:_MAX_ID_CHARS]),)
    if trace and (not is_traced(trace) or keeps(trace, is_error=False, took_s=seconds)):  # else there are no spans
        _, trace_id, span_id, _ = traceparent(invocation, trace).split("-")
        return Exemplar((*labels, ("trace_id", trace_id), ("span_id", span_id)), seconds, at)
    return Exemplar(labels, seconds, at)
