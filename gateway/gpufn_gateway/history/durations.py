"""Distribution of durations in buckets whose bounds grow by 19 %. Distributions of several gateways and spans add up.

A quantile is at most 9 % off: it is the middle of its bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

PER_DOUBLING: Final = 4
_LEAST_S: Final = 1e-4
MAX_BUCKET: Final = 120  # 0.1 ms times 2**30: a day


def bucket_of(seconds: float) -> int:
    """Return the number of the bucket.

    >>> bucket_of(0.0), bucket_of(0.0001), bucket_of(0.05), bucket_of(1e9)
    (0, 0, 36, 120)
    """
    return bisect_left(_UPPER_BOUNDS_S, seconds)


def upper_bound_s(bucket: int) -> float:
    """Return the largest duration in a bucket, in seconds."""
    return float(_LEAST_S * 2.0 ** (bucket / PER_DOUBLING))


_UPPER_BOUNDS_S: Final = tuple(map(upper_bound_s, range(MAX_BUCKET)))  # the last bucket has none


def quantile_s(counts: Mapping[int, int], share: float) -> float | None:
    """Return the duration below which `share` of the observations lie; None without observations.

    >>> quantile_s({36: 99, 60: 1}, 0.5), quantile_s({36: 99, 60: 1}, 0.999), quantile_s({}, 0.5)
    (0.047, 3.0, None)
    """
    total = sum(counts.values())
    if not total:
        return None
    rank, seen = share * total, 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            break
    middle = upper_bound_s(bucket) * 2.0 ** (-0.5 / PER_DOUBLING)
    return float(f"{middle:.3g}")
