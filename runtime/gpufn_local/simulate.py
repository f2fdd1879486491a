"""`gpufn simulate`: compares scheduling orders on a simulated GPU. Needs no platform."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpufn.cli.terminal.output import Json, WrongUsage, print_json, print_table, say, step
from gpufn_core.errors import InvalidInput, PlatformError


class _Figures(msgspec.Struct):
    """The displayed part of the result; `gpufn_local.simulation.figures` documents the fields."""

    mean_s: float
    p50_s: float
    p99_s: float
    slowdown: float
    worst_slowdown: float
    jain: float
    max_min: float
    cold_starts: int
    resumes: int
    busy: float


class _Comparison(msgspec.Struct):
    orders: dict[str, _Figures]


def simulate(  # noqa: PLR0917  Typer passes them by name
    functions: Annotated[int, typer.Option(help="Functions that share the GPU.", min=1, max=500)] = 24,
    seconds: Annotated[float, typer.Option(help="Seconds during which calls arrive.", min=1, max=36_000)] = 600.0,
    zipf: Annotated[float, typer.Option(help="Skew: the call rate is 1 / rank ** ZIPF.", min=0, max=5)] = 1.5,
    busy: Annotated[
        float, typer.Option(help="The part of the GPU's time that calls need if all starts are warm.", min=0.01, max=3)
    ] = 0.4,
    bursty: Annotated[
        bool, typer.Option("--bursty", help="Each function gets calls for 10 s, then none for 50 s.")
    ] = False,
    memory: Annotated[float, typer.Option(help="GiB of GPU memory; functions use 1 to 12.", min=1)] = 24.0,
    park: Annotated[float, typer.Option(help="GiB of host memory for parked workers.", min=0)] = 0.0,
    turns: Annotated[int, typer.Option(help="Calls that run on the GPU at a time.", min=1, max=48)] = 1,
    overrun: Annotated[float, typer.Option(help="Seconds that fair queueing lets a function get ahead.", min=0)] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of the calls.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Write an HTML page with plots to this file.")] = None,
    json: Json = False,
) -> None:
    """Compare orders of calls on a GPU that functions share by time.

    Both the calls and the GPU are simulated. fcfs is first come, first served; sjf is shortest job first; mqfq is the
    order that the platform uses. A function that is not in GPU memory has a cold start, or a resume.
    """
    if plot is not None and not plot.parent.is_dir():
        raise WrongUsage(f"there is no folder {plot.parent}", field="--plot")
    load = {"functions": functions, "seconds": seconds, "zipf": zipf, "busy": busy, "bursty": bursty, "seed": seed}
    gpu = {"memory_gib": memory, "park_gib": park, "turns": turns, "overrun_s": overrun}
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
