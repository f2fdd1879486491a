"""`gpufn why NAME`."""

from __future__ import annotations

import click

from gpufn.cli.terminal.command import Command, connect, json_option
from gpufn.cli.terminal.name_completion import function_name
from gpufn.cli.terminal.output import ago, duration, print_fields, print_json
from gpufn_core.protocol.reports import LastStart
from gpufn_core.spec.priority import Priority

_SHOWN_S = 0.001  # shorter phases are left out


@click.command(cls=Command)
@function_name
@click.option("--verbose", "-v", is_flag=True, help="Show the numbers behind the decision too.")
@json_option
def why(name: str, verbose: bool, json: bool) -> None:
    """Explain a function's number of workers, and why its calls wait."""
    with connect() as client:
        view = client.why(name)
    if json:
        print_json(view)
        return
    unknown = view.queued is None or view.running is None
    waiting = view.waiting
    print_fields(
        [
            ("workers", f"{view.workers}; {view.wanted} wanted"),
            ("reason", view.reason),
            ("calls", "unknown yet" if unknown else f"{view.queued} queued, {view.running} running"),
            ("by priority", _by_priority(view.classes or {})),
            ("calls wait", waiting and f"{waiting.detail} ({waiting.reason})"),
            ("last start", _last_start(view.last_start)),
            ("last start error", view.start_error and view.start_error.summary),
            ("terms", ", ".join(f"{term} {value:.4g}" for term, value in view.terms.items() if verbose)),
        ]
    )


def _last_start(start: LastStart | None) -> str | None:
    """Format a start as a waterfall.

    >>> import time
    >>> _last_start(LastStart("gpu-1", time.time() - 60, {"place": 0.01, "fetch": 0.0, "launch": 0.3, "load": 2.0}))
    '2.31 s on gpu-1, 60 s ago: place 10 ms, launch 300 ms, load 2 s'
    """
    if start is None:
        return None
    phases = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in start.phases.items() if seconds >= _SHOWN_S)
    return f"{duration(sum(start.phases.values()))} on {start.node}, {ago(start.at)}: {phases or 'no long phase'}"


def _by_priority(counts: dict[Priority, int]) -> str | None:
    """Format call counts by priority class. Return None if all calls are normal.

    >>> _by_priority({Priority.HI: 2, Priority.NORMAL: 1000, Priority.LOW: 0}), _by_priority({Priority.NORMAL: 3})
    ('2 hi, 1,000 normal', None)
    """
    nonzero = {priority: count for priority, count in counts.items() if count}
    if nonzero.keys() <= {Priority.NORMAL}:
        return None
    return ", ".join(f"{count:,} {priority.value}" for priority, count in nonzero.items())
