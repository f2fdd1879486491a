"""Counts of durations in buckets that grow by 5 %, and their percentiles. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Final

DurationCounts = Mapping[int, int]  # bucket -> durations in it

_PER_E: Final = 1 / math.log(1.05)
_SHORTEST_S: Final = 1e-5
_LONGEST_S: Final = 1e7


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration. NaN counts as the shortest one."""
    if not seconds > _SHORTEST_S:
        seconds = _SHORTEST_S
    return math.ceil(math.log(min(seconds, _LONGEST_S)) * _PER_E)


def percentile(counts: DurationCounts, percent: float) -> float | None:
    """Return a duration that `percent` of the durations do not exceed: the end of its bucket. None without any.

    >>> counts = Counter({bucket_of(0.1): 98, bucket_of(2.0): 2})
    >>> [round(percentile(counts, each), 2) for each in (50, 99)], percentile({}, 50)
    ([0.1, 2.08], None)
    """
    rank = math.ceil(sum(counts.values()) * percent / 100)
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return math.exp(bucket / _PER_E)
    return None


def growth(now: DurationCounts, before: DurationCounts) -> Counter[int]:
    """Return the counts between two readings of the same counts.

    >>> growth({1: 5, 2: 1}, {1: 3})
    Counter({1: 2, 2: 1})
    """
    return Counter({bucket: more for bucket, count in now.items() if (more := count - before.get(bucket, 0)) > 0})
