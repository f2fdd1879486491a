"""`gpufn top`: devices with their utilization, and the workers on each, redrawn every second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from gpufn.cli.operate.nodes import device_name, metrics_of, power_of, state_of, workers_on
from gpufn.cli.terminal.command import Command, FloatRange, connect
from gpufn.cli.terminal.escape import in_one_line
from gpufn.cli.terminal.output import duration, size
from gpufn_core.errors import GpufnError

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS = ((135, 20), (100, 10), (70, 5), (0, 0))  # (minimum terminal width, width of a bar), in columns
_WIDE = 120  # minimum terminal width to show the ids of workers and GPUs, and the totals of the bars
_MIN_WIDTHS = (0, 0, 0, 36, 50, 0)  # minimum terminal width to show each column of the table
_FIXED = (1, 2, 3, 4)  # columns that keep their width; the first and the last shrink
_FULL, _HIGH = 0.95, 0.8


@click.command(cls=Command)
@click.option("--interval", type=FloatRange(min=0.2), default=1.0, help="Seconds between two updates.")
@click.option("--once", is_flag=True, help="Print once and exit. Always on if the output is not a terminal.")
def top(interval: float, once: bool) -> None:
    """Watch devices and their workers live.

    Ctrl-C ends the command.
    """
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415
    except ImportError as error:
        raise GpufnError("gpufn top needs rich: pip install rich") from error

    console = Console()
    with connect() as client:
        if once or not sys.stdout.isatty():
            console.print(screen(client.nodes(), time.time(), console.width))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen(client.nodes(), time.time(), console.width), refresh=True)
                time.sleep(interval)


def screen(nodes: list[dict[str, Any]], now: float, width: int) -> RenderableType:
    """Render the nodes from `/v1/nodes` in `width` columns. `now` is in unix seconds."""
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[Any] = []
    for node in nodes:
        parts.append(Text(in_one_line(_heading(node)), style="bold"))
        table = Table(box=None, pad_edge=False, show_header=False)
        shown = [column for column, min_width in enumerate(_MIN_WIDTHS) if width >= min_width]
        for column in shown:
            table.add_column(no_wrap=column in _FIXED)
        for device in node.get("devices", []):
            for row in _rows(node, device, now, width):
                # One line each: truncate long cells instead of wrapping them.
                table.add_row(
                    *(
                        Text(in_one_line(cell), no_wrap=True, overflow="ellipsis") if isinstance(cell, str) else cell
                        for cell in map(row.__getitem__, shown)
                    )
                )
        parts.append(table)
    return Group(*parts) if parts else Text("no node has reported: is an agent running?")


def _heading(node: dict[str, Any]) -> str:
    facts = node.get("facts") or {}
    parts = [f"driver {facts['driver']}"] if facts.get("driver") else []
    parts += [f"CUDA {facts['cuda']}"] if facts.get("cuda") else []
    parts += [f"MPS {facts['mps']}"] if facts.get("mps", "none") != "none" else []
    return f"{node['node']}  {', '.join(parts)}".rstrip()


def _rows(node: dict[str, Any], device: dict[str, Any], now: float, width: int) -> Iterator[tuple[Any, ...]]:
    """Yield the row of a device, then the rows of its workers."""
    workers = workers_on(node, device)
    is_gpu = device.get("type") == "gpu"
    metrics = metrics_of(node, device)
    total = device.get("memory_bytes") or 0
    used = metrics.get("memory_used_bytes") if is_gpu else sum(each.get("resident_bytes", 0) for each in workers)
    yield (
        device_name(device) if width >= _WIDE else str(device.get("kind")),
        _bar(metrics.get("utilisation"), width) if is_gpu else "",
        _bar(used / total if used is not None and total else None, width),
        f"{size(used)} of {size(total)}" if width >= _WIDE else size(used),
        _temperature_and_power(metrics),
        "" if device.get("health", "healthy") == "healthy" else state_of(device),
    )
    if not is_gpu:
        workers = [each for each in workers if not (each.get("share") or {}).get("gpus")]
    for worker in workers:
        share = worker.get("share") or {}
        memory = worker.get("gpu_bytes", {}).get(device["uuid"]) if is_gpu else worker.get("resident_bytes")
        limit = share.get("vram_bytes") if is_gpu else share.get("memory_bytes")
        rank = "" if worker.get("rank") is None else f" rank {worker['rank']}"
        name = f"  {worker['function']}@{worker['revision']}{rank}"
        yield (
            f"{name}  {worker['worker']}" if width >= _WIDE else name,
            "",
            _bar(memory / limit if memory is not None and limit else None, width),
            f"{size(memory)} of {size(limit)}" if limit and width >= _WIDE else size(memory),
            _share_text(share) if is_gpu else "",
            ("parked, " if worker.get("parked") else "") + f"for {duration(max(0.0, now - worker['started_at']))}",
        )


def _share_text(share: dict[str, Any]) -> str:
    """Format a share, such as ``mps, 25 %``."""
    sm = f", {share['sm_percent']} %" if share.get("sm_percent", 100) < 100 else ""
    return f"{share.get('mode', 'exclusive')}{sm}"


def _temperature_and_power(metrics: dict[str, Any]) -> str:
    parts = [f"{metrics['temperature_c']} °C"] if metrics.get("temperature_c") is not None else []
    return " ".join([*parts, power_of(metrics)]).strip()


def _bar(fraction: float | None, width: int) -> Any:
    """Render a bar with its percentage for a terminal of `width` columns; ``-`` if `fraction` is unknown."""
    from rich.text import Text  # noqa: PLC0415

    if fraction is None:
        return Text("-", style="dim")
    columns = next(columns for min_width, columns in _BARS if width >= min_width)
    filled = min(columns, round(fraction * columns))
    style = "red" if fraction >= _FULL else "yellow" if fraction >= _HIGH else "green"
    if not columns:
        return Text(f"{fraction:.0%}", style)
    return Text.assemble(("━" * filled, style), ("─" * (columns - filled), "dim"), f" {fraction:4.0%}")
