"""Plot of the latencies of candidates as an SVG: latency over the percentile of runs.

The time axis is linear from zero. It is logarithmic if the slowest run took many times as long as the fastest: a linear
plot would only show a flat line with a cliff at its end. If only percentiles are known, they are plotted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from gpufn_builder.report.report import CandidateRow

_LEFT, _RIGHT = 56, 16
_LOG_SCALE_FROM: Final = 10.0  # ratio of the slowest to the fastest

Height = Callable[[float], float]  # from seconds to the height: 0 at the bottom, 1 at the top


class Plot:
    """The coordinates of a plot; each curve is a row, its points, and the points to mark, as (percentile, seconds)."""

    WIDTH, HEIGHT = 720, 260
    TOP, BOTTOM = 14, 34
    MARKS = (50, 90, 99)

    def __init__(self, rows: Sequence[CandidateRow]) -> None:
        self.curves = [(row, _curve(row), _marked(row)) for row in rows]
        shown = [
            seconds
            for _, curve, marked in self.curves
            for share, seconds in (*curve, *marked)
            if share <= self.MARKS[-1]
        ]
        self._height, self.ticks = axis(min(shown), max(shown))

    def x(self, share: float) -> float:
        return round(_LEFT + share / 100 * (self.WIDTH - _LEFT - _RIGHT), 1)

    def y(self, seconds: float) -> float:
        height = min(self._height(seconds), 1.0)
        return round(self.HEIGHT - self.BOTTOM - height * (self.HEIGHT - self.TOP - self.BOTTOM), 1)


def axis(lowest: float, highest: float) -> tuple[Height, list[float]]:
    """Return the time axis from `lowest` to `highest`, and its ticks.

    >>> axis(1e-3, 1.4e-3)[1], axis(65e-6, 8.8e-3)[1]
    ([0.0, 0.0005, 0.001, 0.0015], [1e-05, 0.0001, 0.001, 0.01])
    """
    if highest > lowest * _LOG_SCALE_FROM > 0:
        low, high = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
        decades = max(1, high - low)
        return lambda seconds: max(0.0, math.log10(seconds or 10.0**low) - low) / decades, [
            float(f"1e{power}") for power in range(low, high + 1)
        ]
    top = highest * 1.15 or 1.0
    step = _round_step(top / 4)
    return lambda seconds: seconds / top, [tick * step for tick in range(int(top / step) + 1)]


def _curve(row: CandidateRow) -> list[tuple[float, float]]:
    if not row.quantiles_s:
        return _marked(row)
    last = len(row.quantiles_s) - 1
    return [(100 * index / last, seconds) for index, seconds in enumerate(row.quantiles_s)]


def _marked(row: CandidateRow) -> list[tuple[float, float]]:
    if row.latency is None:
        return []
    return list(zip(Plot.MARKS, (row.latency.p50_s, row.latency.p90_s, row.latency.p99_s), strict=True))


def _round_step(least: float) -> float:
    """Return the least of 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
