"""`gpufn advise`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gpufn.cli.terminal.command import Command, connect, json_option
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import duration, print_json, print_table, say

if TYPE_CHECKING:
    from gpufn.cli.functions.advice import Replayed, Seen
    from gpufn.client.client import Client

_DAY_S = 86_400.0
_DAYS = 30
_HOURS_OF = ("calls", "memory_max", "gpu_memory_max", "gpu_held_s", "gpu_s")
_MINUTES_OF = ("calls", "run_s")


@click.command(cls=Command)
@function_name
@json_option
def advise(name: str, json: bool) -> None:
    """Compare what a function asks for with what it used, and replay its calls with other idle timeouts.

    The history has thirty days of memory and GPU time, and two days of arrivals by the minute. The replay is that of a
    single worker.
    """
    from gpufn.cli.functions.advice import advise as advice_for  # noqa: PLC0415
    from gpufn.cli.functions.advice import replay  # noqa: PLC0415

    with connect() as client:
        view = client.function(name)
        seen = _seen(client, f"function:{view.name}", time.time())
    advice = advice_for(view.spec, seen, view.min_workers)
    curve = replay(seen.calls_by_minute, view.spec["scaling"]["idle_timeout_s"])
    if json:
        print_json({"function": view.name, "calls": seen.calls, "advice": advice, "idle_timeout": curve, "seen": seen})
        return
    rows = [(each.option, each.value or "-", each.finding) for each in advice]
    print_table(("option", "set to", "because"), rows, empty=f"no advice: {seen.calls:,.0f} calls in {_DAYS} days")
    if curve:
        say(f"\nthe calls of two days, by idle_timeout of {view.name}:")
        print_table(
            ("idle_timeout", "cold starts", "worker time", ""),
            [
                (
                    f"{each.idle_timeout_s:g}",
                    each.cold_starts,
                    duration(each.worker_s),
                    "now" if each.is_current else "",
                )
                for each in curve
            ],
            empty="",
        )


def _seen(client: Client, subject: str, now: float) -> Seen:
    from gpufn.cli.functions.advice import Seen  # noqa: PLC0415

    days = _values(client, subject, _HOURS_OF, (now - _DAYS * _DAY_S, now), step_s=3600)
    minutes: dict[str, list[float]] = {name: [] for name in _MINUTES_OF}
    for start in (now - 2 * _DAY_S, now - _DAY_S):
        for name, values in _values(client, subject, _MINUTES_OF, (start, start + _DAY_S - 60), step_s=60).items():
            minutes[name] += values
    return Seen(
        calls=sum(days["calls"]),
        memory_max=max(days["memory_max"], default=0.0),
        gpu_memory_max=max(days["gpu_memory_max"], default=0.0),
        gpu_held_s=sum(days["gpu_held_s"]),
        gpu_used_s=sum(days["gpu_s"]),
        calls_by_minute=tuple(minutes["calls"]),
        busy_by_minute=tuple(minutes["run_s"]),
    )


def _mark(replayed: Replayed) -> str:
    return "now" if replayed.is_current else ""


def _values(
    client: Client, subject: str, series: tuple[str, ...], span: tuple[float, float], *, step_s: int
) -> dict[str, list[float]]:
    """Return the values of each series; 0 where nothing was recorded."""
    view = client.history(subject, series=series, since=span[0], until=span[1], step_s=step_s)
    return {
        each.name: [value if isinstance(value, (int, float)) else 0.0 for value in each.values]
        for each in view.results[0].series
    }
