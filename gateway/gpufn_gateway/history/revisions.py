"""Points of revisions, without storing twice the calls of a function's only revision. Pure.

A function mostly has calls of one revision. Then the point of the revision would repeat the function's point: it is
omitted, and the function's point has the number of the revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpufn_gateway.history.fields import Field, Point, Points

# The fields of a point of a revision.
_OF_CALLS: Final = (
    Field.CALLS,
    Field.FAILED,
    Field.RUN_MS,
    Field.GPU_MS,
    Field.STARTS,
    Field.START_FAILURES,
    Field.ERRORS,
    Field.LATENCY,
    Field.START_PHASE_MS,
)


def collapse(points: Mapping[str, Point]) -> Points:
    """Leave out the point of a revision that was its function's only one.

    >>> collapse({"function:f": {1: 5}, "function:f@3": {1: 5}})
    {'function:f': {1: 5, <Field.REVISION: 60>: 3}}
    """
    revisions: dict[str, list[str]] = {}
    for subject in points:
        if "@" in subject:
            revisions.setdefault(subject.partition("@")[0], []).append(subject)
    only = {of[0]: function for function, of in revisions.items() if len(of) == 1 and function in points}
    kept = {subject: point for subject, point in points.items() if subject not in only}
    for revision, function in only.items():
        kept[function] = {**points[function], Field.REVISION: int(revision.partition("@")[2])}
    return kept


def expand(points: Mapping[str, Point]) -> Points:
    """Undo `collapse`: points that are added up need all points of revisions.

    >>> expand({"function:f": {1: 5, 60: 3}})
    {'function:f': {1: 5}, 'function:f@3': {1: 5}}
    """
    expanded: Points = {}
    for subject, point in points.items():
        if (revision := point.get(Field.REVISION)) is None:
            expanded[subject] = point
            continue
        expanded[subject] = {field: value for field, value in point.items() if field != Field.REVISION}
        expanded[f"{subject}@{revision}"] = of_calls(point)
    return expanded


def of_calls(point: Mapping[int, Any]) -> Point:
    """Return the fields that a point of a revision has."""
    found = ((int(field), point[field]) for field in _OF_CALLS if field in point)
    return {field: dict(value) if isinstance(value, dict) else value for field, value in found}
