"""Metrics of a simulated order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from gpufn_local.simulation.traces import Call


class Ended(msgspec.Struct, frozen=True, eq=False):
    call: Call
    began: float  # start of its turn, which includes a cold start
    at: float

    @property
    def latency_s(self) -> float:
        return self.at - self.call.at

    @property
    def slowdown(self) -> float:
        """Latency relative to the service time on a dedicated, warm GPU."""
        return self.latency_s / self.call.service_s


class FunctionFigures(msgspec.Struct, frozen=True):
    name: str
    calls: int
    service_s: float
    mean_s: float
    p99_s: float
    slowdown: float  # the mean


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`jain` and `max_min` compare the part of the GPU that each function got while it had calls: Jain's index, and the
    smallest part divided by the largest. Both are 1 if all parts are equal.
    """

    calls: int
    mean_s: float
    p50_s: float
    p99_s: float
    slowdown: float  # the mean over all calls
    worst_slowdown: float  # the mean of the function with the largest mean
    jain: float
    max_min: float
    cold_starts: int
    resumes: int
    busy: float  # part of the time in which the GPU computed or loaded
    per_function: tuple[FunctionFigures, ...]
    latencies_s: tuple[float, ...]  # at the percentiles 0, 1, ... 100


def figures(ended: Sequence[Ended], *, cold_starts: int, resumes: int, busy_s: float) -> Figures:
    """Compute the metrics of at least one call."""
    latencies = sorted(each.latency_s for each in ended)
    by_function: dict[str, list[Ended]] = {}
    for each in ended:
        by_function.setdefault(each.call.function.name, []).append(each)
    rows = tuple(
        _of_function(name, rows) for name, rows in sorted(by_function.items(), key=lambda item: int(item[0][1:]))
    )
    parts = [_part(rows) for rows in by_function.values()]
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
    """Return the least of the sorted `values` that at least `percent` percent of them do not exceed.

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
    """Return the part of the time in which the function had its turn, of the time in which it had unfinished calls."""
    demand_s = until = 0.0
    for row in sorted(rows, key=lambda row: row.call.at):
        demand_s += max(0.0, row.at - max(until, row.call.at))
        until = max(until, row.at)
    return sum(row.at - row.began for row in rows) / demand_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
