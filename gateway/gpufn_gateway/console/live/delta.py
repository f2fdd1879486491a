"""The difference between two values of JSON, for a page that shows the first and gets the second. Pure.

A delta is a list of changes. `[path, value]` sets the value at a path of object keys, and `[path]` removes it. Arrays
are replaced as a whole.
"""

from __future__ import annotations

from typing import Any

Change = list[Any]
Json = Any


def delta(before: Json, after: Json) -> list[Change]:
    """Return the changes from `before` to `after`.

    >>> delta({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4}})
    [[['b', 'd']], [['b', 'c'], 4]]
    """
    changes: list[Change] = []
    _compare(before, after, [], changes)
    return changes


def _compare(before: Json, after: Json, path: list[str], changes: list[Change]) -> None:
    if before == after:
        return
    if not (isinstance(before, dict) and isinstance(after, dict)):
        changes.append([path, after])
        return
    changes += [[[*path, key]] for key in before if key not in after]
    for key, value in after.items():
        if key in before:
            _compare(before[key], value, [*path, key], changes)
        else:
            changes.append([[*path, key], value])
