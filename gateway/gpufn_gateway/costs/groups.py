"""Costs in groups: rows of a table by its columns, and the sums of budgets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gpufn_core.domain.team import Teams
from gpufn_core.domain.usage import UsageKey
from gpufn_core.spec.naming.names import parts_of
from gpufn_gateway.costs.attribution import UNUSED, Cost


def grouped(
    costs: Mapping[UsageKey, Cost], columns: Sequence[str], may_read: Callable[[str], bool], teams: Teams
) -> list[dict[str, Any]]:
    """Return the sums of the costs that have the same values in `columns`, in order. `may_read` is for a function, or
    UNUSED."""
    groups: dict[tuple[str, ...], Cost] = {}
    for key, cost in costs.items():
        if may_read(key.function):
            groups.setdefault(tuple(_value(key, column, teams) for column in columns), Cost()).add(cost)
    return [
        dict(zip(columns, group, strict=True)) | msgspec.structs.asdict(cost) | {"total": cost.total}
        for group, cost in sorted(groups.items())
    ]


def spent_by_subject(costs: Mapping[UsageKey, Cost], teams: Teams) -> dict[str, float]:
    """Return the sums of each function and team, as ``function:NAME`` and ``team:NAME``."""
    spent: dict[str, float] = {}
    for key, cost in costs.items():
        for subject in (f"function:{key.function}", f"team:{teams.name_of(key.function)}"):
            spent[subject] = spent.get(subject, 0.0) + cost.total
    return spent


def _value(key: UsageKey, column: str, teams: Teams) -> str:
    if key.function == UNUSED:
        return key.day if column == "day" else UNUSED
    match column:
        case "team":
            return teams.name_of(key.function)
        case "app":
            env, app, _ = parts_of(key.function)
            return f"{env}/{app}"
    return str(getattr(key, column))
