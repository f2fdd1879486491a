"""`gpufn traffic`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpufn.cli.terminal.command import Argument, Command, FloatRange, IntRange, connect, json_option
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import ago, as_usage_error, duration, print_fields, print_json, print_table, say
from gpufn_core.errors import InvalidInput

if TYPE_CHECKING:
    from gpufn.client.endpoints.traffic import ComparedCalls, TrafficView
    from gpufn_core.domain.traffic import Difference, HeaderRule, Mirror, Returned
    from gpufn_core.protocol.reports import RevisionStatus


@click.command(cls=Command)
@function_name
@click.argument("split", cls=Argument, required=False, help="Percent per revision, such as 1=90,2=10.")
@click.option("--header", "headers", multiple=True, help="Send calls with a header to a revision: x-canary=1:2.")
@click.option(
    "--mirror", help="Send copies of calls to a revision, and compare their results: 2, or 2=5% of the calls."
)
@click.option("--tolerance", type=FloatRange(0, 1), help="Relative difference of equal numbers. Default: 1e-5.")
@click.option(
    "--return-if", "rules", multiple=True, help="Undo the split if a revision breaks a rule: 'errors>2%', 'p99>1.5x'."
)
@click.option("--window", "window_s", type=FloatRange(5, 3600), help="Seconds that a rule looks back. Default: 60.")
@click.option("--min-calls", type=IntRange(min=1), help="Calls in the window before a rule applies. Default: 50.")
@click.option("--differences", is_flag=True, help="Show mirrored calls whose copies ended otherwise.")
@click.option("--clear", is_flag=True, help="Send all calls to the serving revision.")
@json_option
def traffic(
    *,
    name: str,
    split: str | None,
    headers: tuple[str, ...],
    mirror: str | None,
    tolerance: float | None,
    rules: tuple[str, ...],
    window_s: float | None,
    min_calls: int | None,
    differences: bool,
    clear: bool,
    json: bool,
) -> None:
    """Show or set how calls are divided between a function's revisions.

    Each setting replaces the one before as a whole. 100 percent for one revision makes it active, as `gpufn rollback`
    does.
    """
    is_setting = bool(split or headers or mirror or rules)
    if clear + differences + is_setting > 1:
        raise click.UsageError("--clear, --differences and a split exclude each other")
    if not is_setting and not (tolerance is window_s is min_calls is None):
        raise click.UsageError("--tolerance, --window and --min-calls need a split")
    if tolerance is not None and mirror is None:
        raise click.UsageError("--tolerance needs --mirror")
    with connect() as client, as_usage_error():
        if differences:
            found = client.traffic_differences(name)
            print_json(found) if json else _print_differences(found)
            return
        if clear:
            view = client.clear_traffic(name)
        elif is_setting:
            view = client.set_traffic(
                name,
                _weights(split or ""),
                headers=[_header(text) for text in headers],
                mirror=None if mirror is None else _mirror(mirror, tolerance),
                return_if=rules,
                window_s=window_s,
                min_calls=min_calls,
            )
        else:
            view = client.traffic(name)
    print_json(view) if json else _print(view)


def _weights(text: str) -> dict[int, int]:
    """Parse weights.

    >>> _weights("1=90,2=10%")
    {1: 90, 2: 10}
    """
    weights: dict[int, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        revision, _, weight = part.partition("=")
        number, percent = _number(revision), _number(weight.removesuffix("%"))
        if number is None or percent is None:
            raise InvalidInput(f"{part!r} is no weight of a revision: write 1=90,2=10", field="SPLIT")
        if number in weights:
            raise InvalidInput(f"revision {number} has two weights", field="SPLIT")
        weights[number] = percent
    return weights


def _header(text: str) -> HeaderRule:
    from gpufn_core.domain.traffic import HeaderRule  # noqa: PLC0415

    name, _, rest = text.partition("=")
    value, _, revision = rest.rpartition(":")
    number = _number(revision)
    if not name or not value or number is None:
        message = f"{text!r} is no rule for a header: write NAME=VALUE:REVISION, as in x-canary=1:2"
        raise InvalidInput(message, field="header")
    return HeaderRule(name.strip().lower(), value, number)


def _mirror(text: str, tolerance: float | None) -> Mirror:
    from gpufn_core.domain.traffic import Mirror  # noqa: PLC0415

    revision, _, percent = text.partition("=")
    number = _number(revision)
    try:
        share = float(percent.removesuffix("%")) if percent else 100.0
    except ValueError:
        share = 0.0
    if number is None or not 0 < share <= 100:
        raise InvalidInput(f"{text!r} is no mirror: write REVISION or REVISION=PERCENT, as in 2=5%", field="mirror")
    return Mirror(number, share) if tolerance is None else Mirror(number, share, tolerance)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _print(view: TrafficView) -> None:
    print_table(
        ("revision", "percent", "workers", "calls", "errors", "p50", "p99", "note"),
        [_row(view, each) for each in view.revisions],
        empty=f"{view.function} has no revision with calls",
    )
    mirror = view.mirror
    print_fields(
        [
            ("headers", ", ".join(f"{rule.name}={rule.value}: revision {rule.revision}" for rule in view.headers)),
            ("mirror", mirror and f"{mirror.percent:g}% of the calls to revision {mirror.revision}"),
            ("compared", _compared(view.compared)),
            ("returns if", _rules(view)),
            ("returned", _returned(view.returned)),
        ]
    )


def _rules(view: TrafficView) -> str:
    if not view.return_if:
        return ""
    rules = " or ".join(view.return_if)
    return f"{rules}, in {duration(view.window_s)} with at least {view.min_calls} calls"


def _returned(returned: Returned | None) -> str:
    if returned is None:
        return ""
    return f"{ago(returned.at)}, from {returned.weights}: revision {returned.revision}, {returned.reason}"


def _row(view: TrafficView, each: RevisionStatus) -> tuple[Any, ...]:
    notes = [
        "serves" if each.revision == view.serving else "",
        "mirror" if view.mirror is not None and view.mirror.revision == each.revision else "",
        f"does not start: {each.start_error.summary.partition(chr(10))[0]}" if each.start_error else "",
        "about to serve" if each.revision == view.active != view.serving else "",
    ]
    counts = each.total
    is_counted = view.set_at is not None
    return (
        each.revision,
        view.weights.get(each.revision, 0),
        each.workers,
        counts.calls if is_counted else None,
        counts.errors if is_counted else None,
        duration(counts.p50_s) if counts.p50_s is not None else None,
        duration(counts.p99_s) if counts.p99_s is not None else None,
        ", ".join(filter(None, notes)),
    )


def _compared(counts: ComparedCalls | None) -> str | None:
    if counts is None:
        return None
    texts = [f"{counts.equal:,} equal", f"{counts.different:,} different", f"{counts.failed:,} failed"]
    texts += [f"{counts.skipped:,} skipped"] if counts.skipped else []
    if counts.p50_s is not None and counts.copy_p50_s is not None:
        texts.append(f"p50 {duration(counts.copy_p50_s)} instead of {duration(counts.p50_s)}")
    return ", ".join(texts)


def _print_differences(differences: list[Difference]) -> None:
    if not differences:
        say("no differences", err=True)
        return
    print_table(
        ("when", "call", "result", "at", "answer", "copy"),
        [(ago(each.at), each.invocation, each.comparison, each.path, each.answer, each.copy) for each in differences],
        empty="",
    )
