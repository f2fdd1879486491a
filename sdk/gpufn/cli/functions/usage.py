"""`gpufn usage`."""

from __future__ import annotations

import datetime
import enum
from typing import Annotated

import typer

from gpufn.cli.calls.history import span_s
from gpufn.cli.terminal.output import Json, duration, print_json, print_table


class By(enum.StrEnum):
    DAY = "day"
    FUNCTION = "function"
    KEY = "key"


def usage(
    name: Annotated[str | None, typer.Argument(help="The function's name; else all functions.")] = None,
    *,
    since: Annotated[str, typer.Option(help="From the day on that was 3d or 12h ago; days are those of UTC.")] = "6d",
    key: Annotated[str | None, typer.Option(help="Only calls made with the API key of this id.")] = None,
    by: Annotated[
        list[By] | None, typer.Option(help="Add up all but this; may be given again. Else by day, function and key.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what calls took: how long they ran, and the GPU seconds that they are charged.

    A GPU second is charged for each second that a call runs and each GPU that its worker has, under MPS for the
    worker's part of one. Calls that run in one worker at the same time share it. Nothing is charged between calls, nor
    while a worker is parked. A call is counted within ten seconds of its end.
    """
    from gpufn.client.client import Client  # noqa: PLC0415
    from gpufn_core.domain.metering import STORED_EACH_S, Usage  # noqa: PLC0415

    first = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=span_s(since))).date()
    with Client() as client:
        rows = client.usage(function=name, key=key, since=first.isoformat())
    columns = list(dict.fromkeys(by or By))
    added: dict[tuple[str, ...], Usage] = {}
    for row in rows:
        which = tuple(str(getattr(row, column)) for column in columns)
        added[which] = added.get(which, Usage()) + row.usage
    if json:
        told = [dict(zip(columns, which, strict=True)) | {"usage": each} for which, each in added.items()]
        print_json(told)
        return
    print_table(
        (*columns, "calls", "failed", "ran", "gpu seconds"),
        [
            (*which, each.calls, each.failed, duration(each.run_s), f"{each.gpu_s:.1f}" if each.gpu_s else "-")
            for which, each in sorted(added.items())
        ],
        empty=f"no calls have ended since {first}; they are counted within {STORED_EACH_S:g} s of their ends",
    )
