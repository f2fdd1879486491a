"""`gpufn engines`, `gpufn engines gc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpufn.cli import new_app
from gpufn.cli.terminal.output import Json, ago, duration, print_json, print_table, say, size

if TYPE_CHECKING:
    from gpufn.client.views import EngineView

app = new_app(help="List built engines, and remove unused ones.")


@app.callback(invoke_without_command=True)
def _list_by_default(context: typer.Context, json: Json = False) -> None:
    """List built engines, and remove unused ones."""
    if context.invoked_subcommand is None:
        list_engines(json=json)


@app.command("ls")
def list_engines(json: Json = False) -> None:
    """List the engines, newest first."""
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
        engines = client.engines()
    if json:
        print_json(engines)
    else:
        print_engines(engines, "used by", [", ".join(engine.used_by) for engine in engines])


@app.command()
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the engines without removing them.")] = False,
    json: Json = False,
) -> None:
    """Remove unused engines.

    An engine is unused if only failed and retired revisions have it, or if `gpufn build` made it and no function has
    it. A later deploy of its model builds it again.
    """
    from gpufn.client.client import Client  # noqa: PLC0415

    with Client() as client:
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
