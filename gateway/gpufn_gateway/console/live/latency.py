"""Quantiles of a histogram. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Return the value below which `share` of the observations lie, in seconds; None without observations.

    `counts` has one count for each upper bound, and one for what is above all bounds. Within a bucket the observations
    count as evenly distributed. Above the last bound, that bound is returned.

    >>> quantile(0.5, (0.1, 0.2), (0, 2, 0))
    0.15000000000000002
    >>> quantile(0.99, (0.1, 0.2), (0, 0, 1)), quantile(0.5, (0.1,), (0, 0))
    (0.2, None)
    """
    total = sum(counts)
    if not total:
        return None
    rank, below, low = share * total, 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return low
