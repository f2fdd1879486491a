"""`gpufn schedules ls`, `add`, `rm`, `pause`, `resume`, `run`."""

from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from gpufn.cli import new_app
from gpufn.cli.calls.arguments import Class
from gpufn.cli.terminal.output import Json, WrongUsage, as_typed, duration, print_json, print_table, say

if TYPE_CHECKING:
    from gpufn.client.views import ScheduleView

_DELAY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}

Id = Annotated[str, typer.Argument(help="The schedule's id, from `gpufn schedules ls`.")]

app = new_app(help="List, add and pause what functions are called by themselves for.")


@app.callback(invoke_without_command=True)
def _alone(context: typer.Context, json: Json = False) -> None:
    """List, add and pause what functions are called by themselves for."""
    if context.invoked_subcommand is None:
        list_schedules(json=json)


@app.command("ls")
def list_schedules(
    function: Annotated[str | None, typer.Argument(help="Those of one function.")] = None, json: Json = False
) -> None:
    """List the schedules: those that functions declare, and those that were added."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        schedules = client.schedules(function)
    if json:
        print_json(schedules)
        return
    rows = [(each.id, _target(each), _when(each), _next(each), each.invocation) for each in schedules]
    print_table(
        ("id", "calls", "when", "next", "last call"), rows, empty="no schedules: see gpufn schedules add --help"
    )


@app.command()
def add(  # noqa: PLR0917  Typer passes them by name
    function: Annotated[str, typer.Argument(help="The function's name, or name.method for a class.")],
    arguments: Annotated[str, typer.Argument(help="The arguments, as a JSON object.")] = "{}",
    cron: Annotated[str | None, typer.Option(help="Minute, hour, day, month and day of week: '*/5 * * * *'.")] = None,
    delay: Annotated[str | None, typer.Option("--in", help="Once, after so long: 90s, 10m, 2h or 3d.")] = None,
    timezone: Annotated[
        str | None, typer.Option(help="What the cron line's times are in, such as Europe/Berlin; else UTC.")
    ] = None,
    missed: Annotated[
        str | None, typer.Option(help="Of the cron line's runs that were missed: skip, once or all; else once.")
    ] = None,
    priority: Class = None,
    json: Json = False,
) -> None:
    """Call a function by itself: again and again with --cron, or once with --in."""
    from gpufn.client.client import Client  # noqa: PLC0415
    from gpufn_core.spec.schedule import Missed, Schedule  # noqa: PLC0415

    if (cron is None) is (delay is None):
        raise typer.BadParameter("give one of --cron and --in")
    if cron is None and (timezone is not None or missed is not None):
        raise typer.BadParameter("--timezone and --missed are for --cron; --in is once, so long from now")
    missed = "once" if missed is None else missed
    if missed not in tuple(Missed):
        raise typer.BadParameter(f"missed is skip, once or all, not {missed!r}")
    given = _arguments(arguments)
    with Client() as client:
        if cron is not None:
            name, _, method = function.partition(".")
            with as_typed():
                schedule = Schedule(cron, "UTC" if timezone is None else timezone, given, method, Missed(missed))
            view = client.add_schedule(name, schedule, priority=priority)
        else:
            view = client.add_schedule(function, in_s=_seconds(delay or ""), arguments=given, priority=priority)
    if json:
        print_json(view)
    else:
        say(view.id)


@app.command("rm")
def remove(id: Id, json: Json = False) -> None:  # noqa: A002
    """Remove a schedule that was added; one that a function declares goes with a deploy without it."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        client.remove_schedule(id)
    if json:
        print_json({"removed": id})
    else:
        say(f"removed schedule {id}")


@app.command()
def pause(id: Id, json: Json = False) -> None:  # noqa: A002
    """Make no calls until it is resumed; those in between are not made up for."""
    _pause(id, json, paused=True)


@app.command()
def resume(id: Id, json: Json = False) -> None:  # noqa: A002
    """Go on after a pause."""
    _pause(id, json, paused=False)


@app.command()
def run(id: Id, json: Json = False) -> None:  # noqa: A002
    """Make one call more, now, and print its id; `gpufn result ID` has its result later."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        call = client.run_schedule(id)
    if json:
        print_json(call)
    else:
        say(call.id)


def _pause(id_: str, json: bool, *, paused: bool) -> None:
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        view = client.pause_schedule(id_, paused=paused)
    if json:
        print_json(view)
    else:
        say(f"paused {id_}" if paused else f"resumed {id_}; next: {_next(view)}")


def _arguments(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise WrongUsage(f"the arguments are a JSON object, such as '{{\"top\": 5}}': {error}") from None


def _seconds(text: str) -> float:
    """
    >>> _seconds("90s"), _seconds("10m"), _seconds("1.5h"), _seconds("30")
    (90.0, 600.0, 5400.0, 30.0)
    """
    match = _DELAY.fullmatch(text.strip())
    if match is None:
        raise WrongUsage(f"--in is a time such as 90s, 10m, 2h or 3d, not {text!r}")
    return float(match[1]) * _UNITS[match[2] or ""]


def _target(view: ScheduleView) -> str:
    return f"{view.function}.{view.method}" if view.method else view.function


def _when(view: ScheduleView) -> str:
    if view.cron is None:
        return "once"
    return view.cron if view.timezone == "UTC" else f"{view.cron} {view.timezone}"


def _next(view: ScheduleView) -> str:
    if view.paused:
        return "paused"
    if view.next_at is None:
        return "-"
    now = datetime.datetime.now(datetime.UTC).timestamp()
    return f"in {duration(max(round(view.next_at - now), 0))}"
