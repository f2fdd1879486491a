"""`gpufn advise`."""

from __future__ import annotations

import click

from gpufn.cli.terminal.command import Command, connect, json_option
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import duration, print_json, print_table, say


@click.command(cls=Command)
@function_name
@json_option
def advise(name: str, json: bool) -> None:
    """Compare what a function asks for with what it used, and replay its calls with other idle timeouts.

    The history has thirty days of memory, GPU time and sizes of batches, and two days of arrivals by the minute. The
    replay is that of a single worker.
    """
    with connect() as client:
        view = client.advice(name)
    if json:
        print_json(view)
        return
    rows = [(each.option, each.value or "-", each.finding) for each in view.advice]
    calls = f"{view.seen.calls:,.0f} call{'s' if round(view.seen.calls) != 1 else ''} in 30 days"
    reason = "advice needs 100 of them" if view.seen.calls < 100 else "its options fit them"
    print_table(("option", "set to", "because"), rows, empty=f"no advice: {calls}, {reason}")
    for each in view.advice:
        if each.scale:
            bounds = " ".join(f"--{option.removesuffix('_workers')} {value}" for option, value in each.scale.items())
            say(f"without a deploy: gpufn scale {view.function} {bounds}", err=True)
    if view.idle_timeout:
        say(f"\nthe calls of two days, by idle_timeout of {view.function}:")
        print_table(
            ("idle_timeout", "cold starts", "worker time", ""),
            [
                (
                    f"{each.idle_timeout_s:g}",
                    each.cold_starts,
                    duration(each.worker_s),
                    "now" if each.is_current else "",
                )
                for each in view.idle_timeout
            ],
            empty="",
        )
