"""`gpufn cost`."""

from __future__ import annotations

import datetime
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gpufn.cli.calls.history import parse_span_s
from gpufn.cli.functions.charged import charged_to, existing_names
from gpufn.cli.terminal.command import Command, connect, json_option
from gpufn.cli.terminal.output import duration, print_json, print_table, say
from gpufn_core.spec.units import format_money

if TYPE_CHECKING:
    from gpufn.client.views.figures import CostView

_COLUMNS = ("day", "team", "app", "function", "key")
_NONE = {"team": "(no team)"}  # functions of no team; in the other columns, only unused GPU time has no value
_UNUSED = "(unused)"


@click.command(cls=Command)
@click.option(
    "--by", type=click.Choice(_COLUMNS), multiple=True, help="Column to group by. Repeatable. Default: function."
)
@click.option("--since", default="6d", help="Age of the first UTC day, such as 3d or 30d.")
@click.option("--share-unused", is_flag=True, help="Divide the cost of GPUs that no worker held among all.")
@click.option("--all", "show_all", is_flag=True, help="List terminals, variants and temporary functions by name.")
@click.option("--csv", "as_csv", is_flag=True, help="Print FOCUS 1.2 rows, by day, team, function and key.")
@json_option
def cost(*, by: tuple[str, ...], since: str, share_unused: bool, show_all: bool, as_csv: bool, json: bool) -> None:
    """Show what functions cost: used, idle, CPU and unused time, at the prices of GPUFN_PRICES.

    Used GPU time is that of calls, as in `gpufn usage`. Idle time is what workers held without a call, which the
    function pays for. A call counts once for each of its attempts. Held time is known for 30 days, used time for 400.
    Variants of a function, `gpufn exec` and `gpufn shell` count as the function. The functions of `gpufn run`, and
    functions of `gpufn serve` that are gone, are one row.
    """
    first = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=parse_span_s(since))).date()
    columns = tuple(dict.fromkeys(by or ("function",)))
    with connect() as client:
        if as_csv:
            say(client.costs_csv(since=first.isoformat(), share_unused=share_unused).rstrip("\n"))
            return
        view = client.costs(by=columns, since=first.isoformat(), share_unused=share_unused)
        if not show_all:
            existing = existing_names(client, (name for each in view.costs for name in (each.function, each.app)))
            view = msgspec.structs.replace(view, costs=tuple(_grouped(view.costs, columns, existing)))
    if json:
        print_json(view)
        return
    if view.currency is None:
        say("there are no prices: set GPUFN_PRICES (docs/costs.md)", err=True)
    money = view.currency or "cost"
    print_table(
        (
            *columns,
            "attempts",
            "gpu used",
            "gpu idle",
            "used",
            "idle",
            "cpu",
            "unused",
            money,
            "per attempt",
            "kWh",
            "CO2 kg",
        ),
        [
            (*(getattr(each, column) or _NONE.get(column, _UNUSED) for column in columns), *_numbers(each))
            for each in view.costs
        ],
        empty=f"nothing was used since {first}",
    )
    for budget in view.budgets:
        stops = ", then its calls are refused" if budget.stops else ""
        spent = f"{format_money(budget.spent)} of {format_money(budget.limit)} {money}"
        say(f"budget of {budget.subject} for {budget.month}: {spent}{stops}")


def _grouped(costs: Iterable[CostView], columns: Sequence[str], existing: Container[str]) -> Iterable[CostView]:
    """Add up the rows that are charged to the same function or app."""
    groups: dict[tuple[str, ...], CostView] = {}
    for each in costs:
        function, app = (charged_to(name, existing) for name in (each.function, each.app))
        row = msgspec.structs.replace(each, function=function, app=app)
        group = tuple(getattr(row, column) for column in columns)
        groups[group] = row if group not in groups else groups[group] + row
    return groups.values()


def _numbers(row: CostView) -> tuple[Any, ...]:
    per_attempt = format_money(row.total / row.calls) if row.calls else "-"
    joules = "-" if row.joules is None else f"{row.joules / 3.6e6:.3g}"
    co2 = "-" if row.co2_g is None else f"{row.co2_g / 1000:.3g}"
    amounts = map(format_money, (row.used, row.idle, row.cpu, row.unused, row.total))
    return (
        row.calls,
        duration(row.gpu_used_s or None),
        duration(row.gpu_idle_s or None),
        *amounts,
        per_attempt,
        joules,
        co2,
    )
