"""`gpufn top`: devices with what is in use of them, and the workers on each, drawn anew each second."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpufn.cli._render import duration, size
from gpufn.cli.nodes import metrics_of, state_of, workers_on

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR_COLUMNS = 20
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

    from gpufn._client import Client  # noqa: PLC0415

    console = Console()
    with Client() as client:
        if once or not sys.stdout.isatty():
            console.print(screen(client.nodes(), time.time()))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen(client.nodes(), time.time()), refresh=True)
                time.sleep(interval)


def screen(nodes: list[dict[str, Any]], now: float) -> RenderableType:
    """All that is drawn, from what `/v1/nodes` answered at `now`, in unix seconds."""
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[Any] = []
    for node in nodes:
        parts.append(Text(_heading(node), style="bold"))
        table = Table(box=None, pad_edge=False, show_header=False)
        for device in node.get("devices", []):
            _add_device(table, node, device, now)
        parts.append(table)
    return Group(*parts) if parts else Text("no node reports: does an agent run?")


def _heading(node: dict[str, Any]) -> str:
    facts = node.get("facts") or {}
    told = [f"driver {facts['driver']}"] if facts.get("driver") else []
    told += [f"CUDA {facts['cuda']}"] if facts.get("cuda") else []
    told += [f"MPS {facts['mps']}"] if facts.get("mps", "none") != "none" else []
    return f"{node['node']}  {', '.join(told)}".rstrip()


def _add_device(table: Any, node: dict[str, Any], device: dict[str, Any], now: float) -> None:
    workers = workers_on(node, device)
    is_gpu = device.get("type") == "gpu"
    metrics = metrics_of(node, device)
    total = device.get("memory_bytes") or 0
    used = metrics.get("memory_used_bytes") if is_gpu else sum(each.get("resident_bytes", 0) for each in workers)
    table.add_row(
        str(device.get("kind")),
        _bar(metrics.get("utilisation")) if is_gpu else "",
        _bar(used / total if used is not None and total else None),
        f"{size(used)} of {size(total)}",
        _weather(metrics),
        "" if device.get("health", "healthy") == "healthy" else state_of(device),
    )
    if not is_gpu:
        workers = [each for each in workers if not (each.get("share") or {}).get("gpus")]
    for worker in workers:
        share = worker.get("share") or {}
        held = worker.get("gpu_bytes", {}).get(device["uuid"]) if is_gpu else worker.get("resident_bytes")
        limit = share.get("vram_bytes") if is_gpu else share.get("memory_bytes")
        table.add_row(
            f"  {worker['function']}@{worker['revision']}  {worker['worker']}",
            "",
            _bar(held / limit if held is not None and limit else None),
            f"{size(held)} of {size(limit)}" if limit else size(held),
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


def _bar(part: float | None) -> Any:
    """Of 20 columns, with the percentage; ``-`` when it is not known."""
    from rich.text import Text  # noqa: PLC0415

    if part is None:
        return Text("-", style="dim")
    filled = min(_BAR_COLUMNS, round(part * _BAR_COLUMNS))
    style = "red" if part >= _FULL else "yellow" if part >= _HIGH else "green"
    return Text.assemble(("━" * filled, style), ("─" * (_BAR_COLUMNS - filled), "dim"), f" {part:4.0%}")
