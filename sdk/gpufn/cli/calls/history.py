"""`gpufn calls`."""

from __future__ import annotations

import contextlib
import math
import re
import time
from typing import TYPE_CHECKING, NamedTuple

import click

from gpufn.cli.terminal.command import Argument, Command, connect, json_option, limit_option
from gpufn.cli.terminal.output import WrongUsage, ago, duration, print_json, print_table
from gpufn_core.domain.invocation import InvocationState
from gpufn_core.domain.worker import ColdStart
from gpufn_core.errors import FunctionNotFound
from gpufn_core.ids import item_of

if TYPE_CHECKING:
    from gpufn.client.views.calls import DeadLetterView, InvocationView, MapView

_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_START_PHASES = frozenset(f"{phase}_s" for phase in (*ColdStart().phases, *ColdStart(resume_s=0.0).phases))
_MAX_SPAN_S = 36_500 * 86400.0  # a longer one could exceed the range of dates


@click.command(cls=Command)
@click.argument("name", cls=Argument, required=False, help="Name of the function. Default: all functions.")
@click.option("--function", help="Name of the function, which may be deleted.")
@click.option(
    "--state", type=click.Choice([state.value for state in InvocationState]), help="Only calls in this state."
)
@click.option("--key", help="Id of an API key: only calls that it made.")
@click.option("--since", help="Only calls submitted in this time span, such as 90s, 15m, 2h or 3d.")
@limit_option
@json_option
def calls(
    *,
    name: str | None,
    function: str | None,
    state: str | None,
    key: str | None,
    since: str | None,
    limit: int,
    json: bool,
) -> None:
    """List submitted calls and maps, newest first.

    A map is one row. `--state failed` also lists failed items of maps, as long as `gpufn dlq` has them. The queued time
    of a call includes the cold start that it waited for; `gpufn status ID` shows its phases.
    """
    since_at = None if since is None else time.time() - parse_span_s(since)
    with connect() as client:
        only = None if state is None else InvocationState(state)
        views = client.calls(name, function=function, state=only, since=since_at, key=key, limit=limit)
        without_method, _, _ = (name or function or "").partition(".")  # a map belongs to the class, not to a method
        maps = [] if state or key else client.maps(without_method or None, limit=limit)
        letters = []
        if only is not None and only.leaves_dead_letter and not key:
            with contextlib.suppress(FunctionNotFound):  # a deleted function without letters
                letters = client.dead_letters(without_method or None, limit=limit)
    items = [each for each in letters if item_of(each.id) is not None and each.state is only]
    items = [each for each in items if each.submitted_at >= (since_at or 0.0)]
    maps = [each for each in maps if each.submitted_at >= (since_at or 0.0)]
    if json:
        print_json([*views, *maps, *items])
        return
    rows = [*map(_call_row, views), *map(_item_row, items), *map(_map_row, maps)]
    rows.sort(key=lambda row: row.submitted_at or 0.0, reverse=True)
    heading = ("id", *(() if name else ("function",)), "state", "submitted", "queued", "cold start", "ran", "note")
    shown = [(row.id, *(() if name else (row.function,)), *row.cells) for row in rows[:limit]]
    print_table(heading, shown, empty=f"{name} has no submitted calls" if name else "no submitted calls")


class _Row(NamedTuple):
    """`cells` are the columns from the state on."""

    submitted_at: float | None
    id: str
    function: str
    cells: tuple[str, ...]


def _call_row(call: InvocationView) -> _Row:
    note = call.waiting.detail if call.waiting else call.cause
    state = call.state.value if call.attempt == 1 else f"{call.state.value}, attempt {call.attempt}"
    start_s = sum(seconds for name, seconds in call.timings.items() if name in _START_PHASES)
    times = ago(call.submitted_at), duration(call.queue_s), duration(start_s or None), duration(call.run_s)
    return _Row(call.submitted_at, call.id, call.function, (state, *times, note))


def _item_row(item: DeadLetterView) -> _Row:
    ran_s = sum(each.ended_at - each.started_at for each in item.attempts if each.started_at)
    cells = item.state.value, ago(item.submitted_at), "-", "-", duration(ran_s or None), item.cause
    return _Row(item.submitted_at, item.id, item.function, cells)


def _map_row(each: MapView) -> _Row:
    failed = f", {each.failed:,} failed" if each.failed else ""
    note = f"a map: {each.ended:,} of {each.accepted:,} items have ended{failed}"
    return _Row(each.submitted_at, each.id, each.function, (each.state, ago(each.submitted_at), "-", "-", "-", note))


def parse_span_s(text: str, option: str = "--since") -> float:
    """Parse a time span such as `90s`, `15m`, `2h` or `3d` into seconds. Raises WrongUsage.

    >>> parse_span_s("15m"), parse_span_s("1.5h"), parse_span_s("30")
    (900.0, 5400.0, 30.0)
    """
    match = _SPAN.fullmatch(text)
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else math.inf
    if seconds > _MAX_SPAN_S:
        raise WrongUsage(f"write 90s, 15m, 2h or 3d, not {text[:40]!r}", field=option)
    return seconds
