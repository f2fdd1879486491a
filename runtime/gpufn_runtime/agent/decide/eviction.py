"""The choice of weights, volumes and environments that leave a node's disk: the least recently used that no worker
uses. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import msgspec


class StoredFiles(msgspec.Struct, frozen=True):
    """Complete files on the disk, such as the weights of a function: `files` are sizes by key, `used_at` is in unix
    seconds. Two of them can share files."""

    digest: str
    used_at: float
    files: Mapping[str, int]


def evicted(stored: Iterable[StoredFiles], short_bytes: int, kept: Container[str]) -> list[str] | None:
    """Return the digests to remove so that `short_bytes` become free, in order; None if that is impossible.

    >>> a, b = StoredFiles("a", 1.0, {"x": 5, "y": 5}), StoredFiles("b", 2.0, {"y": 5})
    >>> evicted([b, a], 3, kept=()), evicted([a, b], 6, kept=()), evicted([a, b], 6, kept=("a",))
    (['a'], ['a', 'b'], None)
    """
    by_age = sorted(stored, key=lambda each: each.used_at)
    users: dict[str, int] = {}
    for each in by_age:
        for key in each.files:
            users[key] = users.get(key, 0) + 1
    chosen: list[str] = []
    for each in by_age:
        if short_bytes <= 0:
            break
        if each.digest in kept:
            continue
        chosen.append(each.digest)
        for key, size in each.files.items():
            users[key] -= 1
            if not users[key]:
                short_bytes -= size
    return chosen if short_bytes <= 0 else None
