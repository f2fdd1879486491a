"""What a simulated order did, in figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from .traces import Call

_SPAN_S: Final = 60.0


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
    """`jain` and `max_min` compare what functions got of the GPU in spans of 60 s in which two or more waited all the
    time, on average over the spans: Jain's index, and the least part by the largest. Both are 1 when all got the same,
    and None when there was no such span.
    """

    calls: int
    mean_s: float
    p50_s: float
    p99_s: float
    slowdown: float  # the mean over all calls
    worst_slowdown: float  # the mean of the function that fared worst
    jain: float | None
    max_min: float | None
    cold_starts: int
    busy: float  # the part of the time in which the GPU worked or loaded
    per_function: tuple[FunctionFigures, ...]
    latencies_s: tuple[float, ...]  # at the percentiles 0, 1, ... 100


def figures(ended: Sequence[Ended], *, cold_starts: int, busy_s: float) -> Figures:
    """Of at least one call."""
    latencies = sorted(each.latency_s for each in ended)
    of: dict[str, list[Ended]] = {}
    for each in ended:
        of.setdefault(each.call.function.name, []).append(each)
    rows = tuple(_of_function(name, rows) for name, rows in sorted(of.items(), key=lambda item: int(item[0][1:])))
    jain, max_min = _fairness(list(of.values()))
    return Figures(
        calls=len(ended),
        mean_s=_mean(latencies),
        p50_s=percentile(latencies, 50),
        p99_s=percentile(latencies, 99),
        slowdown=_mean([each.slowdown for each in ended]),
        worst_slowdown=max(row.slowdown for row in rows),
        jain=jain,
        max_min=max_min,
        cold_starts=cold_starts,
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


def _fairness(functions: Sequence[Sequence[Ended]]) -> tuple[float | None, float | None]:
    jains: list[float] = []
    max_mins: list[float] = []
    waits = [_waits(rows) for rows in functions]
    for number in range(int(max(row.began for rows in functions for row in rows) / _SPAN_S)):
        begin, end = number * _SPAN_S, (number + 1) * _SPAN_S
        got = [
            sum(max(0.0, min(row.at, end) - max(row.began, begin)) for row in rows)
            for rows, periods in zip(functions, waits, strict=True)
            if any(since <= begin and end <= until for since, until in periods)
        ]
        if len(got) > 1 and any(got):
            jains.append(sum(got) ** 2 / (len(got) * sum(each**2 for each in got)))
            max_mins.append(min(got) / max(got))
    return (_mean(jains), _mean(max_mins)) if jains else (None, None)


def _waits(rows: Sequence[Ended]) -> list[tuple[float, float]]:
    """The periods in which a function had a call that waited."""
    periods: list[tuple[float, float]] = []
    for since, until in sorted((row.call.at, row.began) for row in rows):
        if periods and since <= periods[-1][1]:
            periods[-1] = periods[-1][0], max(periods[-1][1], until)
        else:
            periods.append((since, until))
    return periods


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
