"""`gpufn usage`."""

from __future__ import annotations

import datetime

import click

from gpufn.cli.calls.history import parse_span_s
from gpufn.cli.functions.charged import charged_to, existing_names
from gpufn.cli.terminal.command import Argument, Command, connect, json_option
from gpufn.cli.terminal.output import duration, print_json, print_table

_COLUMNS = ("day", "function", "key")


@click.command(cls=Command)
@click.argument("name", cls=Argument, required=False, help="Name of the function. Default: all functions.")
@click.option("--since", default="6d", help="Age of the first UTC day, such as 3d or 12h.")
@click.option("--key", help="Only calls with the API key of this id.")
@click.option(
    "--by",
    type=click.Choice(_COLUMNS),
    multiple=True,
    help="Column to group by. Repeatable. Default: day, function and key.",
)
@click.option("--all", "show_all", is_flag=True, help="List terminals, variants and temporary functions by name.")
@json_option
def usage(*, name: str | None, since: str, key: str | None, by: tuple[str, ...], show_all: bool, json: bool) -> None:
    """Show the run time, the GPU seconds and the energy of calls.

    A running call is charged one GPU second per second for each GPU of its worker; under MPS, the worker's share of
    one. Concurrent calls of one worker share this charge. Time between calls and the time of parked workers are not
    charged. A call is counted within ten seconds of its end, once for each of its attempts.

    The energy that a GPU uses in a second is divided among the calls that ran on it, by their GPU seconds. Calls whose
    energy is unknown count neither in the joules nor in the joules per attempt.

    Variants of a function, `gpufn exec` and `gpufn shell` count as the function. The functions of `gpufn run`, and
    functions of `gpufn serve` that are gone, are one row.
    """
    from gpufn_core.domain.usage import STORE_INTERVAL_S, Usage  # noqa: PLC0415

    first = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=parse_span_s(since))).date()
    with connect() as client:
        rows = client.usage(function=name, key=key, since=first.isoformat())
        existing = frozenset() if show_all else existing_names(client, (row.function for row in rows))
    columns = list(dict.fromkeys(by or _COLUMNS))
    totals: dict[tuple[str, ...], Usage] = {}
    for row in rows:
        function = row.function if show_all else charged_to(row.function, existing)
        group = tuple(function if column == "function" else str(getattr(row, column)) for column in columns)
        totals[group] = totals.get(group, Usage()) + row.usage
    if json:
        print_json([dict(zip(columns, group, strict=True)) | {"usage": total} for group, total in totals.items()])
        return
    print_table(
        (*columns, "attempts", "failed", "ran", "gpu seconds", "joules", "per attempt"),
        [
            (
                *group,
                total.calls,
                total.failed,
                duration(total.run_s),
                f"{total.gpu_s:.1f}" if total.gpu_s else "-",
                _energy(total.joules),
                _energy(total.joules_per_call),
            )
            for group, total in sorted(totals.items())
        ],
        empty=f"no calls have ended since {first}; a call is counted within {STORE_INTERVAL_S:g} s of its end",
    )


def _energy(joules: float | None) -> str:
    return "-" if joules is None else f"{joules:,.1f}"
