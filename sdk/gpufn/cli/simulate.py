"""`gpufn simulate`: orders of calls on one GPU, compared on paper. It needs no platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpufn.cli._render import Json, print_json, print_table, say, step


def simulate(  # noqa: PLR0917  Typer passes them by name
    functions: Annotated[int, typer.Option(help="That share the GPU.", min=1, max=500)] = 24,
    seconds: Annotated[float, typer.Option(help="For which calls come.", min=1, max=36_000)] = 600.0,
    zipf: Annotated[float, typer.Option(help="How uneven: calls are as 1 / rank ** ZIPF.", min=0, max=5)] = 1.5,
    busy: Annotated[
        float, typer.Option(help="The part of the GPU that calls need, were every start warm.", min=0.01, max=3)
    ] = 0.4,
    bursty: Annotated[
        bool, typer.Option("--bursty", help="Functions are called for 10 s at a time, then not for 50 s.")
    ] = False,
    memory: Annotated[float, typer.Option(help="GiB of the GPU; functions take 1 to 12.", min=1)] = 24.0,
    turns: Annotated[int, typer.Option(help="Calls on the GPU at a time.", min=1, max=48)] = 1,
    overrun: Annotated[float, typer.Option(help="Seconds that fair queueing lets a function get ahead.", min=0)] = 10.0,
    seed: Annotated[int, typer.Option(help="The same calls for the same seed.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file, an HTML page.")] = None,
    json: Json = False,
) -> None:
    """Compare orders of calls on a GPU that functions share by time.

    Calls that nobody makes, on a GPU that is not there. fcfs is first come, first served; sjf the shortest first; mqfq
    is what the platform does. A function that is not in the GPU's memory has a cold start.
    """
    from gpufn.simulation.gpu import Gpu  # noqa: PLC0415
    from gpufn.simulation.page import render  # noqa: PLC0415
    from gpufn.simulation.run import compare  # noqa: PLC0415
    from gpufn.simulation.traces import Load  # noqa: PLC0415

    load = Load(functions=functions, seconds=seconds, zipf=zipf, busy=busy, bursty=bursty, seed=seed)
    with step("Simulating"):
        compared = compare(load, Gpu(turns=turns, overrun_s=overrun, memory_gib=memory))
    if plot is not None:
        plot.write_text(render(compared))
    if json:
        print_json(compared)
        return
    rows = [
        (
            name,
            *(f"{each:.3g} s" for each in (figures.mean_s, figures.p50_s, figures.p99_s)),
            f"{figures.slowdown:,.0f} x",
            f"{figures.worst_slowdown:,.0f} x",
            f"{figures.jain:.2f}",
            f"{figures.max_min:.2f}",
            f"{figures.cold_starts:,}",
            f"{figures.busy:.0%}",
        )
        for name, figures in compared.orders.items()
    ]
    columns = ("order", "mean", "50 %", "99 %", "slowdown", "worst function", "jain", "max-min", "cold starts", "busy")
    print_table(columns, rows, empty="")
    if plot is not None:
        say(f"the plot is in {plot}", err=True)
