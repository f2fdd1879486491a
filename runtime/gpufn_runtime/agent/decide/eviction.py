"""The choice of weights that leave a node's disk: the least recently used that no worker uses. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import msgspec


class StoredWeights(msgspec.Struct, frozen=True):
    """Complete weights on the disk: `files` are sizes by key, `used_at` is in unix seconds. Weights can share files."""

    digest: str
    used_at: float
    files: Mapping[str, int]


def evicted(stored: Iterable[StoredWeights], short_bytes: int, kept: Container[str]) -> list[str] | None:
    """Return the digests to remove so that `short_bytes` become free, in order; None if that is impossible.

    >>> a, b = StoredWeights("a", 1.0, {"x": 5, "y": 5}), StoredWeights("b", 2.0, {"y": 5})
    >>> evicted([b, a], 3, kept=()), evicted([a, b], 6, kept=()), evicted([a, b], 6, kept=("a",))
    (['a'], ['a', 'b'], None)
    """
    by_age = sorted(stored, key=lambda weights: weights.used_at)
    users: dict[str, int] = {}
    for weights in by_age:
        for key in weights.files:
            users[key] = users.get(key, 0) + 1
    chosen: list[str] = []
    for weights in by_age:
        if short_bytes <= 0:
            break
        if weights.digest in kept:
            continue
        chosen.append(weights.digest)
        for key, size in weights.files.items():
            users[key] -= 1
            if not users[key]:
                short_bytes -= size
    return chosen if short_bytes <= 0 else None
