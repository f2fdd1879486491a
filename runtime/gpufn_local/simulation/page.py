"""Rendering of a Comparison as a self-contained HTML page: no scripts, fonts or external links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gpufn_local.simulation.figures import Figures
from gpufn_local.simulation.run import Comparison

NAMES: Final = {"fcfs": "first come, first served", "sjf": "shortest job first", "mqfq": "MQFQ-Sticky"}

_COLOURS: Final = {"fcfs": "var(--c0)", "sjf": "var(--c1)", "mqfq": "var(--c2)"}
_WIDTH, _HEIGHT = 760, 280  # of a plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 32
_MARKS: Final = (0, 25, 50, 75, 90, 99)
_MAX_LABELS: Final = 24
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #e3e7ec; --page: #f6f7f9; --card: #fff;
  --c0: #2563eb; --c1: #d97706; --c2: #0d9488; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #94a0b0; --line: #2a323d; --page: #11151b;
  --card: #191f28; --c0: #60a5fa; --c1: #fbbf24; --c2: #2dd4bf; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 920px; margin: 0 auto; padding: 28px 18px 60px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 16px; margin: 0 0 12px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; white-space: nowrap; padding: 6px 0 6px 12px; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
p { color: var(--soft); margin: 8px 0 0; font-size: 13px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
span { display: inline-block; margin-right: 20px; }
"""


def render(comparison: Comparison) -> str:
    """Return the complete page."""
    load, gpu = comparison.load, comparison.gpu
    calls = next(iter(comparison.orders.values())).calls
    lead = (
        f"{calls:,} {'bursty' if load.bursty else 'steady'} calls of {load.functions} functions in {load.seconds:g} s, "
        f"Zipf {load.zipf:g}, seed {load.seed}; {load.busy:.0%} of the GPU if all starts were warm. "
        f"{gpu.memory_gib:g} GiB, {gpu.workers} workers, {gpu.park_gib:g} GiB for parking, turns: {gpu.turns}, "
        f"overrun {gpu.overrun_s:g} s."
    )
    key = "".join(
        f"<span><i style='background:{_COLOURS[name]}'></i>{NAMES[name]}</span>" for name in comparison.orders
    )
    parts = [
        f"<h1>One GPU, three orders</h1><p>{lead}</p>",
        f"<section>{_table(comparison.orders)}</section>",
        f"<section><h2>Latency</h2>{_latencies(comparison.orders)}"
        f"<p>{key}x axis: percentile of all calls</p></section>",
        f"<section><h2>Slowdown relative to a dedicated GPU</h2>{_slowdowns(comparison.orders)}"
        f"<p>{key}x axis: functions, the most frequent first</p></section>",
    ]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'><title>gpufn simulate</title>"
    body = f"<body><main>{''.join(parts)}</main></body>"
    return f"<!doctype html>\n<html lang=en><head>{head}<style>{_STYLE}</style></head>{body}</html>\n"


def _table(orders: dict[str, Figures]) -> str:
    heads = (
        "",
        "mean",
        "50 %",
        "99 %",
        "slowdown",
        "worst function",
        "Jain",
        "max-min",
        "cold starts",
        "resumes",
        "busy",
    )
    rows = "".join(
        f"<tr><td><i style='background:{_COLOURS[name]}'></i>{NAMES[name]}"
        f"<td>{each.mean_s:.3g} s<td>{each.p50_s:.3g} s<td>{each.p99_s:.3g} s"
        f"<td>{each.slowdown:,.0f} &times;<td>{each.worst_slowdown:,.0f} &times;"
        f"<td>{each.jain:.2f}<td>{each.max_min:.2f}"
        f"<td>{each.cold_starts:,}<td>{each.resumes:,}<td>{each.busy:.0%}"
        for name, each in orders.items()
    )
    return f"<table><tr>{''.join(f'<th>{head}' for head in heads)}{rows}</table>"


def _latencies(orders: dict[str, Figures]) -> str:
    """Plot seconds over percentiles."""
    scale = _Scale([value for each in orders.values() for value in each.latencies_s])
    elements = scale.grid(" s")
    for mark in _MARKS:
        elements.append(f"<text x={_x(mark / 100):.1f} y={_HEIGHT - 10} text-anchor=middle>{mark} %</text>")
    for name, each in orders.items():
        points = " ".join(
            f"{_x(percent / 100):.1f},{scale.y(value):.1f}" for percent, value in enumerate(each.latencies_s)
        )
        elements.append(f"<polyline points='{points}' fill=none stroke='{_COLOURS[name]}' stroke-width=2.5 />")
    return _svg(elements)


def _slowdowns(orders: dict[str, Figures]) -> str:
    """Plot the mean slowdown per function."""
    scale = _Scale([row.slowdown for each in orders.values() for row in each.per_function])
    elements = scale.grid(" &times;")
    count = max(int(row.name[1:]) for each in orders.values() for row in each.per_function)
    every = math.ceil(count / _MAX_LABELS)
    for number in range(1, count + 1, every):
        x = _x((number - 0.5) / count)
        elements.append(f"<text x={x:.1f} y={_HEIGHT - 10} text-anchor=middle>f{number}</text>")
    for name, each in orders.items():
        for row in each.per_function:
            x, y = _x((int(row.name[1:]) - 0.5) / count), scale.y(row.slowdown)
            label = f"{NAMES[name]}, {row.name}: {row.slowdown:,.3g} times {row.service_s:.2g} s, {row.calls} calls"
            circle = f"<circle cx={x:.1f} cy={y:.1f} r=4.5 fill='{_COLOURS[name]}' fill-opacity=.85>"
            elements.append(f"{circle}<title>{label}</title></circle>")
    return _svg(elements)


class _Scale:
    """A logarithmic scale from positive values to heights in the plot."""

    def __init__(self, values: Sequence[float]) -> None:
        self._low = math.floor(math.log10(min(values)))
        self._high = max(math.ceil(math.log10(max(values))), self._low + 1)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self, unit: str) -> list[str]:
        lines = []
        for power in range(self._low, self._high + 1):
            y = self.y(10.0**power)
            lines.append(f"<line x1={_LEFT} x2={_WIDTH - _RIGHT} y1={y:.1f} y2={y:.1f} stroke='var(--line)' />")
            lines.append(f"<text x={_LEFT - 8} y={y + 4:.1f} text-anchor=end>{10.0**power:,g}{unit}</text>")
        return lines


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _svg(elements: Sequence[str]) -> str:
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img>{''.join(elements)}</svg>"
