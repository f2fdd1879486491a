"""`gpufn simulate`: compares scheduling orders on a simulated GPU. Needs no platform."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from gpufn.cli.terminal.command import PATH, Command, FloatRange, IntRange, json_option
from gpufn.cli.terminal.output import WrongUsage, print_json, print_table, say, step
from gpufn_core.errors import InvalidInput, PlatformError
from gpufn_local.simulation.figures import Figures


class _Comparison(msgspec.Struct):
    orders: dict[str, Figures]


@click.command(cls=Command)
@click.option("--functions", type=IntRange(1, 500), default=24, help="Functions that share the GPU.")
@click.option("--seconds", type=FloatRange(1, 36_000), default=600.0, help="Seconds during which calls arrive.")
@click.option("--zipf", type=FloatRange(0, 5), default=1.5, help="Skew: the call rate is 1 / rank ** ZIPF.")
@click.option(
    "--busy",
    type=FloatRange(0.01, 3),
    default=0.4,
    help="The part of the GPU's time that calls need if all starts are warm.",
)
@click.option("--bursty", is_flag=True, help="Each function gets calls for 10 s, then none for 50 s.")
@click.option(
    "--memory", "memory_gib", type=FloatRange(min=1), default=24.0, help="GiB of GPU memory; functions use 1 to 12."
)
@click.option("--park", "park_gib", type=FloatRange(min=0), default=0.0, help="GiB of host memory for parked workers.")
@click.option("--turns", type=IntRange(1, 48), default=1, help="Calls that run on the GPU at a time.")
@click.option(
    "--overrun",
    "overrun_s",
    type=FloatRange(min=0),
    default=10.0,
    help="Seconds that fair queueing lets a function get ahead.",
)
@click.option("--seed", type=int, default=1, help="Seed of the calls.")
@click.option("--plot", type=PATH, help="Write an HTML page with plots to this file.")
@json_option
def simulate(*, plot: Path | None, json: bool, **options: Any) -> None:
    """Compare orders of calls on a GPU that functions share by time.

    Both the calls and the GPU are simulated. fcfs is first come, first served; sjf is shortest job first; mqfq is the
    order that the platform uses. A function that is not in GPU memory has a cold start, or a resume.
    """
    if plot is not None and not plot.parent.is_dir():
        raise WrongUsage(f"there is no folder {plot.parent}", field="--plot")
    load = {name: options[name] for name in ("functions", "seconds", "zipf", "busy", "bursty", "seed")}
    gpu = {name: options[name] for name in ("memory_gib", "park_gib", "turns", "overrun_s")}
    with step("Simulating"):
        result = _run({"load": load, "gpu": gpu, "plot": str(plot or "")})
    if json:
        print_json(msgspec.Raw(result))
    else:
        _show(msgspec.json.decode(result, type=_Comparison))
    if plot is not None:
        say(f"the plot is in {plot}", err=True)


def _run(question: object) -> bytes:
    """Run the simulation in a separate process, because it imports the gateway's package."""
    command = [sys.executable, "-m", "gpufn_local.simulation", msgspec.json.encode(question).decode()]
    process = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    error = process.stderr.decode(errors="replace").strip()
    if process.returncode == 2:
        raise InvalidInput(error)
    if process.returncode:
        raise PlatformError(f"the simulation failed: {error.rpartition(chr(10))[2]}")
    return process.stdout


def _show(comparison: _Comparison) -> None:
    columns = (
        "order", "mean", "50 %", "99 %", "slowdown", "worst function", "jain", "max-min", "cold starts", "resumes",
        "busy",
    )  # fmt: skip
    rows = [
        (
            name,
            *(f"{each:.3g} s" for each in (figures.mean_s, figures.p50_s, figures.p99_s)),
            f"{figures.slowdown:,.0f} x",
            f"{figures.worst_slowdown:,.0f} x",
            f"{figures.jain:.2f}",
            f"{figures.max_min:.2f}",
            f"{figures.cold_starts:,}",
            f"{figures.resumes:,}",
            f"{figures.busy:.0%}",
        )
        for name, figures in comparison.orders.items()
    ]
    print_table(columns, rows, empty="")
