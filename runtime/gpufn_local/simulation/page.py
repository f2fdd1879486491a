"""Rendering of a Comparison as a self-contained HTML page: no scripts, fonts or external links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import jinja2

from gpufn_local.simulation.run import Comparison

_WIDTH, _HEIGHT = 760, 280  # of a plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 32
_MAX_LABELS: Final = 24
_TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.PackageLoader("gpufn_local", "simulation"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(comparison: Comparison) -> str:
    """Return the complete page."""
    orders = comparison.orders.values()
    rows = [row for each in orders for row in each.per_function]
    count = max(int(row.name[1:]) for row in rows)
    return _TEMPLATES.get_template("page.html.jinja").render(
        load=comparison.load,
        gpu=comparison.gpu,
        orders=comparison.orders,
        calls=next(iter(orders)).calls,
        width=_WIDTH,
        height=_HEIGHT,
        x=_x,
        latency=_Scale([value for each in orders for value in each.latencies_s]),
        slowdown=_Scale([row.slowdown for row in rows]),
        count=count,
        label_every=math.ceil(count / _MAX_LABELS),
    )


class _Scale:
    """A logarithmic scale from positive values to heights in the plot."""

    def __init__(self, values: Sequence[float]) -> None:
        self._low = math.floor(math.log10(min(values)))
        self._high = max(math.ceil(math.log10(max(values))), self._low + 1)
        self.ticks = [10.0**power for power in range(self._low, self._high + 1)]

    def y(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _x(share: float) -> float:
    return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)
