"""`gpufn history`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gpufn.cli.calls.history import parse_span_s
from gpufn.cli.terminal.command import Argument, Command, FloatRange, connect, json_option
from gpufn.cli.terminal.output import duration, print_json, print_table, say, size

if TYPE_CHECKING:
    from gpufn.client.views.figures import HistoryView, SeriesView

_LEVELS = "▁▂▃▄▅▆▇█"
_GAP = " "
_COLUMNS = 60  # of a sparkline
_KINDS = ("function:", "node:", "gpu:")
_SUMMED = ("calls", "requests", "starts", "s", "GPU s", "core s", "J")  # units whose values add up over the steps
# These have such a unit, but do not add up.
_MEASURES = ("p50", "p90", "p95", "p99", "queue_p50", "queue_p99", "queued", "queued_max", "running")


@click.command(cls=Command)
@click.argument(
    "name",
    cls=Argument,
    required=False,
    help="Name of a function, FUNCTION@REVISION, node:NAME or gpu:UUID. Default: all functions together.",
)
@click.option("--since", default="1h", help="Start, as an age such as 30m, 6h or 7d. At most 30d.")
@click.option("--until", help="End, as an age. Default: now.")
@click.option("--series", multiple=True, help="Series to show, such as calls, p99 or gpu_held_s. Repeatable.")
@click.option("--step", type=FloatRange(min=10), help="Seconds per value, a multiple of 10. Default: as fits.")
@json_option
def history(
    *, name: str | None, since: str, until: str | None, series: tuple[str, ...], step: float | None, json: bool
) -> None:
    """Show calls, errors, latency and workers over time.

    The history is kept for 30 days: in steps of 10 seconds for two hours, of a minute for two days, and of an hour for
    the rest. A gap in a line is a time in which nothing was recorded.
    """
    now = time.time()
    subject = "overview" if name in (None, "overview") else name if name.startswith(_KINDS) else f"function:{name}"
    start = now - parse_span_s(since)
    end = None if until is None else now - parse_span_s(until)
    step = step or _fitting(start, end or now)
    with connect() as client:
        view = client.history(subject, series=series, since=start, until=end, step_s=step)
    if json:
        print_json(view)
        return
    for result in view.results:
        rows = [_row(each) for each in result.series]
        say(f"{result.subject}, {_span(view)}", err=True)
        print_table(("series", "last", "min", "max", "total", "over time"), rows, empty="no series")


def _fitting(start: float, end: float) -> float | None:
    """Return a step with which a span fits one line; None leaves it to the gateway, which keeps old steps coarse."""
    steps = (10, 30, 60, 300, 900, 3600, 10_800, 21_600, 43_200)
    age_s = time.time() - start
    least = 10 if age_s <= 7_200 else 60 if age_s <= 2 * 86_400 else 3_600
    return next((step for step in steps if step >= least and (end - start) / step <= _COLUMNS), None)


def _span(view: HistoryView) -> str:
    first, last = (time.strftime("%m-%d %H:%M", time.localtime(at)) for at in (view.at[0], view.at[-1] + view.step))
    return f"{first} to {last} in steps of {duration(view.step)}"


def _row(series: SeriesView) -> tuple[str, ...]:
    numbers = [sum(each.values()) if isinstance(each, dict) else each for each in series.values]
    known = [each for each in numbers if each is not None]
    is_sum = series.unit in _SUMMED and series.name not in _MEASURES
    texts = [
        _text(each, series)
        for each in (
            known[-1] if known else None,
            min(known, default=None),
            max(known, default=None),
            sum(known) if is_sum and known else None,
        )
    ]
    return series.name, *texts, sparkline(numbers)


def _text(value: float | None, series: SeriesView) -> str:
    if value is None:
        return "-"
    match series.unit:
        case "bytes":
            return size(round(value))
        case "s":
            return duration(value)
        case "share":
            return f"{value:.0%}"
    return f"{value:,.4g}" if value != int(value) else f"{int(value):,}"


def sparkline(values: list[float | None]) -> str:
    """Draw values from zero to their maximum; an unknown one is a gap.

    >>> sparkline([0, 1, None, 8, 4])
    '▁▁ █▄'
    """
    top = max((value for value in values if value is not None), default=0.0)

    def level(value: float | None) -> str:
        if value is None:
            return _GAP
        return _LEVELS[max(0, min(7, round(value / top * 8) - 1))] if top > 0 else _LEVELS[0]

    return "".join(map(level, values))
