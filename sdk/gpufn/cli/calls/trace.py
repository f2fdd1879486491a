"""`gpufn trace` and `gpufn traces`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from gpufn.cli.terminal.command import Argument, Command, IntRange, connect, json_option
from gpufn.cli.terminal.output import ago, duration, print_json, print_table, say

if TYPE_CHECKING:
    from gpufn.client.views.traces import SpanView, TraceView

_BAR_COLUMNS = 40
_LONGEST_NAME = 44


@click.command(cls=Command)
@click.argument("id", cls=Argument, help="Id of a call, as in X-Gpufn-Invocation, or of a trace.")
@json_option
def trace(*, id: str, json: bool) -> None:  # noqa: A002  its name in the help
    """Show how the time of a traced call was spent, with its attempts and nested calls.

    The gateway keeps the last traces in memory, if GPUFN_TRACES_RATIO is set for it.
    """
    with connect() as client:
        view = client.trace(id)
    if json:
        print_json(view)
        return
    start = min(span.start for span in view.spans)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start))
    say(f"trace {view.id}, {when}", err=True)
    print_table(("span", "start", "duration", "", "details"), waterfall(view), empty="no spans")
    if view.left_out:
        say(f"{view.left_out:,} further spans are not kept", err=True)


@click.command(cls=Command)
@click.argument("function", cls=Argument, required=False, help="Name of a function. Default: all functions.")
@click.option("--limit", "-n", type=IntRange(min=1, max=1000), default=20, help="Number of traces.")
@json_option
def traces(*, function: str | None, limit: int, json: bool) -> None:
    """List the traces that the gateway keeps, newest first."""
    with connect() as client:
        view = client.traces(function, limit=limit)
    if json:
        print_json(view)
        return
    rows = [
        (each.id, each.name, ago(each.start), duration(each.end - each.start), each.spans, each.errors or "")
        for each in view.traces
    ]
    empty = "no traces" if view.enabled else "calls are not traced: set GPUFN_TRACES_RATIO for the gateway"
    print_table(("trace", "call", "age", "duration", "spans", "errors"), rows, empty=empty)


def waterfall(view: TraceView) -> list[tuple[str, ...]]:
    """Return a row per span, below its parent: its name, start, duration, a bar and details."""
    start, end = min(span.start for span in view.spans), max(span.end for span in view.spans)
    return [
        (
            ("  " * depth + span.name)[:_LONGEST_NAME],
            f"+{duration(span.start - start)}",
            duration(span.end - span.start),
            _bar(span, start, end),
            _details(span),
        )
        for depth, span in _tree(view.spans)
    ]


def _tree(spans: tuple[SpanView, ...]) -> list[tuple[int, SpanView]]:
    """Return the spans with their depth, each below its parent. A span whose parent is unknown is at the top."""
    by_id = {span.id: span for span in spans}
    children: dict[str, list[SpanView]] = {}
    for span in by_id.values():
        children.setdefault(span.parent if span.parent in by_id and span.parent != span.id else "", []).append(span)
    rows: list[tuple[int, SpanView]] = []
    waiting = [(0, span) for span in reversed(children.get("", []))]
    while waiting:
        depth, span = waiting.pop()
        rows.append((depth, span))
        waiting += [(depth + 1, each) for each in reversed(children.get(span.id, []))]
    return rows


def _bar(span: SpanView, start: float, end: float) -> str:
    scale = _BAR_COLUMNS / max(end - start, 1e-9)
    before = min(_BAR_COLUMNS - 1, int((span.start - start) * scale))
    length = max(1, min(_BAR_COLUMNS - before, round((span.end - span.start) * scale)))
    return " " * before + ("!" if span.error else "█") * length


def _details(span: SpanView) -> str:
    if span.error is not None:
        return f"{span.error.code}: {span.error.message}".splitlines()[0][:100]
    names = ("gpufn.node", "gpufn.worker", "gpufn.outcome") if span.name == "run" else ("gpufn.outcome",)
    return " ".join(str(span.attributes[name]) for name in names if name in span.attributes)
