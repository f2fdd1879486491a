"""`gpufn engines`, `gpufn engines gc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gpufn.cli.terminal.command import Group, connect, json_option
from gpufn.cli.terminal.output import ago, duration, print_json, print_table, say, size

if TYPE_CHECKING:
    from gpufn.client.views.models import EngineView

app = Group("engines", help="List built engines, and remove unused ones.")


@app.command("ls")
@json_option
def list_engines(json: bool) -> None:
    """List the engines, newest first."""
    with connect() as client:
        engines = client.engines()
    if json:
        print_json(engines)
    else:
        print_engines(engines, "used by", [", ".join(engine.used_by) for engine in engines])


@app.command()
@click.option("--dry-run", is_flag=True, help="List the engines without removing them.")
@json_option
def gc(dry_run: bool, json: bool) -> None:
    """Remove unused engines.

    An engine is unused if only failed and retired revisions have it, or if `gpufn build` made it and no function has
    it. A later deploy of its model builds it again.
    """
    with connect() as client:
        collected = client.collect_engines(dry_run=dry_run)
    if json:
        print_json(collected)
        return
    print_engines(collected.engines, "built", [ago(engine.built_at) for engine in collected.engines])
    if collected.engines:
        verb = "would be" if dry_run else "were"
        count = len(collected.engines)
        say(f"{count} engine{'s' if count != 1 else ''} {verb} removed, {size(collected.bytes)}", err=True)


def print_engines(engines: Sequence[EngineView], last: str, cells: Sequence[str]) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            engine.key[:12],
            engine.model,
            engine.backend,
            engine.device,
            engine.precision,
            size(engine.size),
            engine.latency and duration(engine.latency.p50_s),
            cell,
        )
        for engine, cell in zip(engines, cells, strict=True)
    ]
    columns = ("engine", "model", "backend", "device", "precision", "size", "p50", last)
    print_table(columns, rows, empty="no engines" if last == "used by" else "every engine is in use")
