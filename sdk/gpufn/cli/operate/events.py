"""`gpufn events`."""

from __future__ import annotations

import datetime
import time

import click

from gpufn.cli.calls.history import parse_span_s
from gpufn.cli.terminal.command import Argument, Command, connect, json_option, limit_option
from gpufn.cli.terminal.output import print_json, print_table

_KINDS = ("function:", "node:", "gpu:")


@click.command(cls=Command)
@click.argument(
    "name", cls=Argument, required=False, help="Name of a function, node:NAME or gpu:UUID. Default: everything."
)
@click.option("--kind", multiple=True, help="Kind of event, such as deploy, scale or fault. Repeatable.")
@click.option("--since", help="Only events of this time span, such as 30m, 2h or 3d.")
@limit_option
@json_option
def events(*, name: str | None, kind: tuple[str, ...], since: str | None, limit: int, json: bool) -> None:
    """List deploys, scale decisions, faults and other events.

    The newest is the last.
    """
    subject = None if name is None else name if name.startswith(_KINDS) else f"function:{name}"
    since_at = None if since is None else time.time() - parse_span_s(since)
    with connect() as client:
        found = list(client.events(subject=subject, kinds=kind, since=since_at, limit=limit).events)
    found.reverse()
    if json:
        print_json(found)
        return
    rows = [
        (
            f"{datetime.datetime.fromtimestamp(each.at):%Y-%m-%d %H:%M:%S}",
            each.kind,
            each.subject.removeprefix("function:"),
            each.text.partition("\n")[0],
        )
        for each in found
    ]
    print_table(("time", "event", "about", "what"), rows, empty="no events")
