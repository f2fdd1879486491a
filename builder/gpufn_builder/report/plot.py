"""Plot of the latencies of candidates as an SVG: latency over the percentile of runs.

The time axis is linear from zero, or logarithmic if the slowest run took many times as long as the fastest, because a
linear plot would only show a flat line with a cliff at its end. If only percentiles are known, they are plotted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gpufn_builder.report.markup import Html, duration, tag
from gpufn_builder.report.report import CandidateRow
from gpufn_core.domain.engine import Backend

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 14, 34
_MARKS: Final = (50, 90, 99)
_LOG_SCALE_FROM: Final = 10.0  # ratio of the slowest to the fastest

Height = Callable[[float], float]  # from seconds to the height: 0 at the bottom, 1 at the top


def plot(rows: Sequence[CandidateRow], colours: Mapping[Backend, str]) -> Html:
    curves = [(row, _curve(row)) for row in rows if row.latency]
    shown = [seconds for row, curve in curves for share, seconds in (*curve, *_marked(row)) if share <= _MARKS[-1]]
    height, ticks = axis(min(shown), max(shown))
    lines = []
    for tick in ticks:
        y = _y(height(tick))
        lines.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, stroke="var(--line)"))
        lines.append(tag("text", duration(tick), x=_LEFT - 8, y=y + 4, text_anchor="end"))
    for mark in _MARKS:
        x = _x(mark)
        dashes = {"stroke": "var(--soft)", "stroke_dasharray": "2 5", "stroke_opacity": ".6"}
        lines.append(tag("line", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM, **dashes))
        lines.append(tag("text", f"{mark} %", x=x, y=_HEIGHT - 12, text_anchor="middle"))
    for row, curve in curves:
        points = " ".join(f"{_x(share):.1f},{_y(min(height(seconds), 1.0)):.1f}" for share, seconds in curve)
        colour = colours[row.backend]
        lines.append(tag("polyline", points=points, fill="none", stroke=colour, stroke_width="2.5"))
        lines.extend(
            tag("circle", cx=_x(share), cy=_y(height(seconds)), r="4", fill=colour) for share, seconds in _marked(row)
        )
    return tag("svg", *lines, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img")


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
    return list(zip(_MARKS, (row.latency.p50_s, row.latency.p90_s, row.latency.p99_s), strict=True))


def _x(share: float) -> float:
    return _LEFT + share / 100 * (_WIDTH - _LEFT - _RIGHT)


def _y(height: float) -> float:
    return _HEIGHT - _BOTTOM - height * (_HEIGHT - _TOP - _BOTTOM)


def _round_step(least: float) -> float:
    """Return the least of 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
