"""What a simulated order did, in figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from gpufn_local.simulation.traces import Call


class Ended(msgspec.Struct, frozen=True, eq=False):
    call: Call
    began: float  # its turn; a cold start is part of it
    at: float

    @property
    def latency_s(self) -> float:
        return self.at - self.call.at

    @property
    def slowdown(self) -> float:
        """How many times as long as on a GPU of its own, warm."""
        return self.latency_s / self.call.service_s


class FunctionFigures(msgspec.Struct, frozen=True):
    name: str
    calls: int
    service_s: float
    mean_s: float
    p99_s: float
    slowdown: float  # the mean


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`jain` and `max_min` compare the part of the GPU that each function had while it had calls: Jain's index, and the
    least by the largest. Both are 1 when all had the same.
    """

    calls: int
    mean_s: float
    p50_s: float
    p99_s: float
    slowdown: float  # the mean over all calls
    worst_slowdown: float  # the mean of the function that fared worst
    jain: float
    max_min: float
    cold_starts: int
    resumes: int
    busy: float  # the part of the time in which the GPU worked or loaded
    per_function: tuple[FunctionFigures, ...]
    latencies_s: tuple[float, ...]  # at the percentiles 0, 1, ... 100


def figures(ended: Sequence[Ended], *, cold_starts: int, resumes: int, busy_s: float) -> Figures:
    """Of at least one call."""
    latencies = sorted(each.latency_s for each in ended)
    of: dict[str, list[Ended]] = {}
    for each in ended:
        of.setdefault(each.call.function.name, []).append(each)
    rows = tuple(_of_function(name, rows) for name, rows in sorted(of.items(), key=lambda item: int(item[0][1:])))
    parts = [_part(rows) for rows in of.values()]
    return Figures(
        calls=len(ended),
        mean_s=_mean(latencies),
        p50_s=percentile(latencies, 50),
        p99_s=percentile(latencies, 99),
        slowdown=_mean([each.slowdown for each in ended]),
        worst_slowdown=max(row.slowdown for row in rows),
        jain=sum(parts) ** 2 / (len(parts) * sum(part**2 for part in parts)),
        max_min=min(parts) / max(parts),
        cold_starts=cold_starts,
        resumes=resumes,
        busy=busy_s / max(each.at for each in ended),
        per_function=rows,
        latencies_s=tuple(percentile(latencies, percent) for percent in range(101)),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of the sorted `values` that so many are not above.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50), percentile([1.0, 2.0, 3.0, 4.0], 99)
    (2.0, 4.0)
    """
    return values[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _of_function(name: str, rows: Sequence[Ended]) -> FunctionFigures:
    latencies = sorted(row.latency_s for row in rows)
    return FunctionFigures(
        name,
        len(rows),
        rows[0].call.function.service_s,
        _mean(latencies),
        percentile(latencies, 99),
        _mean([row.slowdown for row in rows]),
    )


def _part(rows: Sequence[Ended]) -> float:
    """Of the time in which a function had a call that had not ended, the part in which one of them had its turn."""
    asked_s = until = 0.0
    for row in sorted(rows, key=lambda row: row.call.at):
        asked_s += max(0.0, row.at - max(until, row.call.at))
        until = max(until, row.at)
    return sum(row.at - row.began for row in rows) / asked_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
