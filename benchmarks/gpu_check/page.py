"""Rendering of a Report as a self-contained HTML page: no scripts, fonts or external links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import jinja2

from gpu_check.findings import Plot, Report, State

_WIDTH, _HEIGHT = 720, 260  # of a plot
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 12, 12, 30
_COLOURS: Final = ("#2563eb", "#d97706", "#0d9488", "#9333ea")
_CLASSES: Final = {State.PASSED: "good", State.SKIPPED: "soft", State.FAILED: "bad", State.TIMED_OUT: "bad"}


def render(report: Report, titles: dict[str, str], plots: Sequence[Plot]) -> str:
    """Return the complete page."""
    about = report.machine
    lead = (
        report.device, report.driver and f"driver {report.driver}", f"{about['cores']} cores of {about['cpu']}",
        f"Linux {about['kernel']}", f"Python {about['python']}", f"{report.seconds:.0f} s",
    )  # fmt: skip
    return _TEMPLATES.get_template("page.html.jinja").render(
        report=report, titles=titles, lead=lead, classes=_CLASSES, pictures=[_Picture(plot) for plot in plots]
    )


class _Bar(NamedTuple):
    colour: str
    x: float
    y: float
    width: float
    height: float
    tooltip: str


class _Picture:
    """The marks of a plot: bars, with a logarithmic scale if the values span a factor of more than 100."""

    width, height, left, right = _WIDTH, _HEIGHT, _LEFT, _WIDTH - _RIGHT

    def __init__(self, plot: Plot) -> None:
        self.title, self.unit = plot.title, plot.unit
        self.key = [(_colour(place), name) for place, name in enumerate(plot.series)]
        self.ticks: list[tuple[float, str]] = []
        self.labels: list[tuple[float, str]] = []
        self.bars: list[_Bar] = []
        if values := [value for series in plot.series.values() for value in series if value]:
            self._draw(plot, _Scale(values))

    def _draw(self, plot: Plot, scale: _Scale) -> None:
        group = (_WIDTH - _LEFT - _RIGHT) / len(plot.labels)
        bar = min(group * 0.8 / len(plot.series), 46)
        self.ticks = [(round(scale.y(tick), 1), _number(tick)) for tick in scale.ticks()]
        for index, label in enumerate(plot.labels):
            middle = _LEFT + group * (index + 0.5)
            self.labels.append((round(middle, 1), label))
            for place, (name, series) in enumerate(plot.series.items()):
                if value := series[index]:
                    x, y = middle - bar * (len(plot.series) / 2 - place), scale.y(value)
                    height = max(_HEIGHT - _BOTTOM - y, 1)
                    tooltip = f"{name}, {label}: {_number(value)} {plot.unit}"
                    width = round(bar * 0.9, 1)
                    self.bars.append(_Bar(_colour(place), round(x, 1), round(y, 1), width, round(height, 1), tooltip))


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


_TEMPLATES: Final = jinja2.Environment(
    loader=jinja2.PackageLoader("gpu_check", ""),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
