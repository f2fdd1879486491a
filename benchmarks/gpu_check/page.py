"""The report as one self-contained HTML page: no scripts, fonts or external addresses."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

from gpu_check.findings import Plot, Report, Result, State, Table

_WIDTH, _HEIGHT = 720, 260  # of a plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 12, 30
_COLOURS: Final = ("#2563eb", "#d97706", "#0d9488", "#9333ea")
_CLASSES: Final = {State.PASSED: "good", State.SKIPPED: "soft", State.FAILED: "bad", State.TIMED_OUT: "bad"}
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #dfe4ea; --page: #f6f7f9; --card: #fff;
  --good: #15803d; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #94a0b0; --line: #2a323d; --page: #11151b;
  --card: #191f28; --good: #4ade80; --bad: #f87171; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 28px 18px 60px; }
h1 { font-size: 25px; margin: 0; } h2 { font-size: 16px; margin: 0 0 10px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin-bottom: 10px; }
caption { text-align: left; color: var(--soft); }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: 13px; }
.n { white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 6px 0 14px; }
"""


def render(report: Report, titles: dict[str, str], plots: Sequence[Plot]) -> str:
    """Return the whole page."""
    about = report.machine
    lead = " · ".join(filter(None, (
        report.device, report.driver and f"driver {report.driver}", f"{about['cores']} cores of {about['cpu']}",
        f"Linux {about['kernel']}", f"Python {about['python']}", f"{report.seconds:.0f} s",
    )))  # fmt: skip
    parts = [f"<h1>gpu-check, {_text(report.date)}</h1><p class=soft>{_text(lead)}</p>"]
    if report.pretended:
        parts.append("<p class=bad>The GPU was pretended: this run tested the check itself, and no figure counts.</p>")
    parts.append(f"<section>{_overview(report.results)}</section>")
    parts += [f"<section><h2>{_text(plot.title)}</h2>{_plot(plot)}</section>" for plot in plots]
    parts += [_step(result, titles.get(result.step, result.step)) for result in report.results]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>gpu-check {_text(report.date)}</title><style>{_STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body><main>{''.join(parts)}</main></body></html>\n"


def _overview(results: Sequence[Result]) -> str:
    rows = "".join(
        f"<tr><td>{_text(result.step)}<td class={_CLASSES[result.state]}>{_text(result.state)}"
        f"<td class=n>{result.seconds:.1f} s<td>{_text(result.line)}"
        for result in results
    )
    return f"<table><tr><th>step<th><th>time<th>{rows}</table>"


def _step(result: Result, title: str) -> str:
    tables = "".join(map(_table, result.finding.tables if result.finding else ()))
    outputs = result.finding.said.items() if result.finding else ()
    verbatim = "".join(f"<p class=soft>{_text(command)}</p><pre>{_text(answer)}</pre>" for command, answer in outputs)
    detail = f"<pre>{_text(result.detail)}</pre>" if result.detail else ""
    shown = tables + verbatim + detail
    return f"<section><h2>{_text(title)}</h2>{shown}</section>" if shown else ""


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(cell)}" for cell in table.headers)
    rows = "".join(f"<tr>{''.join(f'<td>{_text(cell)}' for cell in row)}" for row in table.rows)
    caption = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    return f"<table>{caption}<tr>{head}{rows}</table>"


def _plot(plot: Plot) -> str:
    """Return bars, with a logarithmic scale if the values span a factor of more than 100."""
    values = [value for series in plot.series.values() for value in series if value]
    if not values:
        return "<p class=soft>Nothing was measured.</p>"
    scale = _Scale(values)
    group = (_WIDTH - _LEFT - _RIGHT) / len(plot.labels)
    bar = min(group * 0.8 / len(plot.series), 46)
    marks = []
    for tick in scale.ticks():
        y = scale.y(tick)
        marks.append(f"<line x1={_LEFT} x2={_WIDTH - _RIGHT} y1={y:.1f} y2={y:.1f} stroke='var(--line)' />")
        marks.append(f"<text x={_LEFT - 8} y={y + 4:.1f} text-anchor=end>{_number(tick)}</text>")
    for index, label in enumerate(plot.labels):
        middle = _LEFT + group * (index + 0.5)
        marks.append(f"<text x={middle:.1f} y={_HEIGHT - 8} text-anchor=middle>{_text(label)}</text>")
        left = middle - bar * len(plot.series) / 2
        for place, (name, series) in enumerate(plot.series.items()):
            if value := series[index]:
                x, y = left + place * bar, scale.y(value)
                tooltip = f"<title>{_text(f'{name}, {label}: {_number(value)} {plot.unit}')}</title>"
                size = f"x={x:.1f} y={y:.1f} width={bar * 0.9:.1f} height={max(_HEIGHT - _BOTTOM - y, 1):.1f}"
                marks.append(f"<rect {size} rx=2 fill='{_colour(place)}'>{tooltip}</rect>")
    picture = f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img>{''.join(marks)}</svg>"
    names = enumerate(plot.series)
    key = "".join(f"<i class=key style='background:{_colour(place)}'></i>{_text(name)}" for place, name in names)
    return f"{picture}<p class=soft>{_text(plot.unit)}{key}</p>"


class _Scale:
    """Scale from values to heights in the picture."""

    def __init__(self, values: Sequence[float]) -> None:
        self._is_log = max(values) / min(values) > 100
        self._low = 10.0 ** math.floor(math.log10(min(values))) if self._is_log else 0.0
        self._high = max(values) * 1.08

    def y(self, value: float) -> float:
        if self._is_log:
            share = math.log(max(value, self._low) / self._low) / math.log(self._high / self._low)
        else:
            share = value / self._high
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def ticks(self) -> list[float]:
        """Return powers of ten, or a few round numbers."""
        if self._is_log:
            first, last = math.floor(math.log10(self._low)), math.floor(math.log10(self._high))
            return [10.0**power for power in range(first, last + 1)]
        power = 10.0 ** math.floor(math.log10(self._high / 4))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= self._high / 5)
        return [step * index for index in range(int(self._high / step) + 1)]


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(value: object) -> str:
    return html.escape(str(value))
