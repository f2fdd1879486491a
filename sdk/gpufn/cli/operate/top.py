"""`gpufn top`: devices with what is in use of them, and the workers on each, drawn anew each second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpufn.cli.operate.nodes import metrics_of, named, state_of, workers_on
from gpufn.cli.terminal.escape import in_one_line
from gpufn.cli.terminal.output import duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType

_BARS = ((135, 20), (100, 10), (70, 5), (0, 0))  # from so many columns of the terminal on, a bar has so many
_WIDE = 120  # columns of the terminal, for ids of workers and GPUs, and for what the bars are of
_SHOWN_FROM = (0, 0, 0, 36, 50, 0)  # columns of the terminal, for each of the table's
_FIXED = (1, 2, 3, 4)  # the first and the last get narrower, where there is too little room
_FULL, _HIGH = 0.95, 0.8


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once; so it does where the output is no terminal.")
    ] = False,
) -> None:
    """Watch the devices and the workers on them, live.

    Ctrl-C ends it.
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from gpufn.client.client import Client  # noqa: PLC0415

    console = Console()
    with Client() as client:
        if once or not sys.stdout.isatty():
            console.print(screen(client.nodes(), time.time(), console.width))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen(client.nodes(), time.time(), console.width), refresh=True)
                time.sleep(interval)


def screen(nodes: list[dict[str, Any]], now: float, width: int) -> RenderableType:
    """All that is drawn in `width` columns, from what `/v1/nodes` answered at `now`, in unix seconds."""
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[Any] = []
    for node in nodes:
        parts.append(Text(in_one_line(_heading(node)), style="bold"))
        table = Table(box=None, pad_edge=False, show_header=False)
        shown = [column for column, least in enumerate(_SHOWN_FROM) if width >= least]
        for column in shown:
            table.add_column(no_wrap=column in _FIXED)
        for device in node.get("devices", []):
            for row in _rows(node, device, now, width):
                # One line each: what does not fit is cut, not wrapped.
                table.add_row(
                    *(
                        Text(in_one_line(cell), no_wrap=True, overflow="ellipsis") if isinstance(cell, str) else cell
                        for cell in map(row.__getitem__, shown)
                    )
                )
        parts.append(table)
    return Group(*parts) if parts else Text("no node reports: does an agent run?")


def _heading(node: dict[str, Any]) -> str:
    facts = node.get("facts") or {}
    told = [f"driver {facts['driver']}"] if facts.get("driver") else []
    told += [f"CUDA {facts['cuda']}"] if facts.get("cuda") else []
    told += [f"MPS {facts['mps']}"] if facts.get("mps", "none") != "none" else []
    return f"{node['node']}  {', '.join(told)}".rstrip()


def _rows(node: dict[str, Any], device: dict[str, Any], now: float, width: int) -> Iterator[tuple[Any, ...]]:
    """The device, then the workers on it."""
    workers = workers_on(node, device)
    is_gpu = device.get("type") == "gpu"
    metrics = metrics_of(node, device)
    total = device.get("memory_bytes") or 0
    used = metrics.get("memory_used_bytes") if is_gpu else sum(each.get("resident_bytes", 0) for each in workers)
    yield (
        named(device) if width >= _WIDE else str(device.get("kind")),
        _bar(metrics.get("utilisation"), width) if is_gpu else "",
        _bar(used / total if used is not None and total else None, width),
        f"{size(used)} of {size(total)}" if width >= _WIDE else size(used),
        _weather(metrics),
        "" if device.get("health", "healthy") == "healthy" else state_of(device),
    )
    if not is_gpu:
        workers = [each for each in workers if not (each.get("share") or {}).get("gpus")]
    for worker in workers:
        share = worker.get("share") or {}
        held = worker.get("gpu_bytes", {}).get(device["uuid"]) if is_gpu else worker.get("resident_bytes")
        limit = share.get("vram_bytes") if is_gpu else share.get("memory_bytes")
        name = f"  {worker['function']}@{worker['revision']}"
        yield (
            f"{name}  {worker['worker']}" if width >= _WIDE else name,
            "",
            _bar(held / limit if held is not None and limit else None, width),
            f"{size(held)} of {size(limit)}" if limit and width >= _WIDE else size(held),
            _terms(share) if is_gpu else "",
            ("parked, " if worker.get("parked") else "") + f"for {duration(max(0.0, now - worker['started_at']))}",
        )


def _terms(share: dict[str, Any]) -> str:
    """As ``mps, 25 %``."""
    sm = f", {share['sm_percent']} %" if share.get("sm_percent", 100) < 100 else ""
    return f"{share.get('mode', 'exclusive')}{sm}"


def _weather(metrics: dict[str, Any]) -> str:
    told = [f"{metrics['temperature_c']} °C"] if metrics.get("temperature_c") is not None else []
    told += [f"{metrics['power_w']:.0f} W"] if metrics.get("power_w") is not None else []
    return " ".join(told)


def _bar(part: float | None, width: int) -> Any:
    """With the percentage, for a terminal of `width` columns; ``-`` when it is not known."""
    from rich.text import Text  # noqa: PLC0415

    if part is None:
        return Text("-", style="dim")
    columns = next(columns for least, columns in _BARS if width >= least)
    filled = min(columns, round(part * columns))
    style = "red" if part >= _FULL else "yellow" if part >= _HIGH else "green"
    if not columns:
        return Text(f"{part:.0%}", style)
    return Text.assemble(("━" * filled, style), ("─" * (columns - filled), "dim"), f" {part:4.0%}")
