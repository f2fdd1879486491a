"""`gpufn schedules ls`, `add`, `rm`, `pause`, `resume`, `run`."""

from __future__ import annotations

import datetime
import re
from typing import TYPE_CHECKING

import click
import msgspec

from gpufn.cli.calls.arguments import priority_option
from gpufn.cli.terminal.command import Argument, Group, connect, json_option, yes_option
from gpufn.cli.terminal.output import (
    WrongUsage,
    as_usage_error,
    confirm,
    duration,
    print_json,
    print_table,
    say_or_json,
)
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from gpufn.client.views.functions import ScheduleView

_DELAY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}

app = Group("schedules", help="List, add, pause and remove schedules.")

_id_argument = click.argument("id", cls=Argument, help="Id of the schedule, as `gpufn schedules ls` prints it.")


@app.command("ls")
@click.argument("function", cls=Argument, required=False, help="Name of the function. Default: all functions.")
@json_option
def list_schedules(function: str | None, json: bool) -> None:
    """List the declared and the added schedules."""
    with connect() as client:
        schedules = client.schedules(function)
    if json:
        print_json(schedules)
        return
    rows = [(each.id, _target(each), _when(each), _next(each), each.invocation) for each in schedules]
    print_table(
        ("id", "calls", "when", "next", "last call"), rows, empty="no schedules: see `gpufn schedules add --help`"
    )


@app.command()
@click.argument("function", cls=Argument, help="Name of the function, or FUNCTION.METHOD for a class.")
@click.argument("arguments", cls=Argument, default="{}", help="Arguments as a JSON object. Default: {}.")
@click.option("--cron", help="Cron line (minute, hour, day, month, day of week), such as '*/5 * * * *'.")
@click.option("--in", "delay", help="Delay of a single call: 90s, 10m, 2h or 3d.")
@click.option("--timezone", help="Time zone of the cron line, such as Europe/Berlin. Default: UTC.")
@click.option("--missed", help="Handling of missed runs of the cron line: skip, once or all. Default: once.")
@priority_option
@json_option
def add(
    *,
    function: str,
    arguments: str,
    cron: str | None,
    delay: str | None,
    timezone: str | None,
    missed: str | None,
    priority: Priority | None,
    json: bool,
) -> None:
    """Add a schedule: repeated calls with --cron, or a single call with --in."""
    from gpufn_core.spec.schedule import Missed, Schedule  # noqa: PLC0415

    if (cron is None) is (delay is None):
        raise click.BadParameter("pass either --cron or --in")
    if cron is None and (timezone is not None or missed is not None):
        raise click.BadParameter("--timezone and --missed need --cron")
    missed = "once" if missed is None else missed
    if missed not in tuple(Missed):
        raise click.BadParameter(f"--missed must be skip, once or all, not {missed!r}")
    parsed = _arguments(arguments)
    with connect() as client:
        if cron is not None:
            name, _, method = function.partition(".")
            with as_usage_error():
                schedule = Schedule(cron, "UTC" if timezone is None else timezone, parsed, method, Missed(missed))
            view = client.add_schedule(name, schedule, priority=priority)
        else:
            view = client.add_schedule(function, in_s=_seconds(delay or ""), arguments=parsed, priority=priority)
    say_or_json(view.id, view, json=json)


@app.command("rm")
@_id_argument
@yes_option
@json_option
def remove(id: str, yes: bool, json: bool) -> None:  # noqa: A002
    """Remove an added schedule. To remove a declared schedule, deploy the function without it."""
    confirm(f"Remove the schedule {id}?", yes=yes)
    with connect() as client:
        client.remove_schedule(id)
    say_or_json(f"removed schedule {id}", {"removed": id}, json=json)


@app.command()
@_id_argument
@json_option
def pause(id: str, json: bool) -> None:  # noqa: A002
    """Pause a schedule. Calls due during the pause are skipped."""
    _pause(id, json, paused=True)


@app.command()
@_id_argument
@json_option
def resume(id: str, json: bool) -> None:  # noqa: A002
    """Resume a paused schedule."""
    _pause(id, json, paused=False)


@app.command()
@_id_argument
@json_option
def run(id: str, json: bool) -> None:  # noqa: A002
    """Make one extra call now and print its id, for `gpufn result ID`."""
    with connect() as client:
        call = client.run_schedule(id)
    say_or_json(call.id, call, json=json)


def _pause(id_: str, json: bool, *, paused: bool) -> None:
    with connect() as client:
        view = client.pause_schedule(id_, paused=paused)
    say_or_json(f"paused {id_}" if paused else f"resumed {id_}; next: {_next(view)}", view, json=json)


def _arguments(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise WrongUsage(f"the arguments must be a JSON object, such as '{{\"top\": 5}}': {error}") from None


def _seconds(text: str) -> float:
    """
    >>> _seconds("90s"), _seconds("10m"), _seconds("1.5h"), _seconds("30")
    (90.0, 600.0, 5400.0, 30.0)
    """
    match = _DELAY.fullmatch(text.strip())
    if match is None:
        raise WrongUsage(f"--in must be a delay such as 90s, 10m, 2h or 3d, not {text!r}")
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
