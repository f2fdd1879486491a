"""`gpufn why NAME`."""

from __future__ import annotations

from typing import Annotated

import typer

from gpufn.cli.functions.manage import workers
from gpufn.cli.terminal.name_completion import FunctionName
from gpufn.cli.terminal.output import Json, print_fields, print_json
from gpufn_core.spec.priority import Priority


def why(
    name: FunctionName,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="And the figures that it was decided from.")] = False,
    json: Json = False,
) -> None:
    """Say why a function has the workers it has, and why its calls wait."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        view = client.why(name)
    if json:
        print_json(view)
        return
    unknown = view.queued is None or view.running is None
    waiting = view.waiting
    print_fields(
        [
            ("workers", f"{workers(view.workers)}; {view.wanted} wanted"),
            ("because", view.reason),
            ("calls", "not known yet" if unknown else f"{view.queued} queued, {view.running} running"),
            ("of class", _classes(view.classes or {})),
            ("calls wait", waiting and f"{waiting.detail} ({waiting.reason})"),
            ("last start error", view.start_error and view.start_error.summary),
            ("figures", ", ".join(f"{term} {value:.4g}" for term, value in view.terms.items() if verbose)),
        ]
    )


def _classes(counts: dict[Priority, int]) -> str | None:
    """Nothing while all are normal.

    >>> _classes({Priority.HI: 2, Priority.NORMAL: 1000, Priority.LOW: 0}), _classes({Priority.NORMAL: 3})
    ('2 hi, 1,000 normal', None)
    """
    there = {priority: count for priority, count in counts.items() if count}
    if there.keys() <= {Priority.NORMAL}:
        return None
    return ", ".join(f"{count:,} {priority.value}" for priority, count in there.items())
