"""Simulated call orders on one GPU: means over seeds, for steady and bursty calls and several loads.

python benchmarks/simulate.py --seeds 10
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import measure
from gpufn_local.simulation.gpu import Gpu
from gpufn_local.simulation.run import compare
from gpufn_local.simulation.traces import Load

_BUSY = (0.3, 0.5)
_PARK_GIB = (0.0, 64.0)
_OVERRUNS_S = (5.0, 20.0)  # in addition to the default
_FIGURES = {
    "mean_s": "mean s",
    "p50_s": "p50 s",
    "p99_s": "p99 s",
    "slowdown": "slowdown",
    "worst_slowdown": "worst function",
    "jain": "Jain",
    "max_min": "max-min",
    "cold_starts": "cold starts",
    "resumes": "resumes",
    "busy": "GPU busy",
}


def main() -> None:
    options = measure.arguments("Simulated call orders on one GPU.", seeds=10)
    about = measure.machine()
    rows = [
        {"bursty": bursty, "load": busy, "park_gib": park_gib, "order": order, **figures}
        for bursty in (False, True)
        for busy in _BUSY
        for park_gib in _PARK_GIB
        for order, figures in _orders(bursty, busy, park_gib, range(1, options.seeds + 1)).items()
    ]
    measure.write("simulate", {"seeds": options.seeds, "rows": rows}, _table(options.seeds, rows), about)


def _orders(bursty: bool, busy: float, park_gib: float, seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    loads = [Load(bursty=bursty, busy=busy, seed=seed) for seed in seeds]
    figures = _means(loads, Gpu(park_gib=park_gib))
    for overrun_s in _OVERRUNS_S:
        gpu = Gpu(park_gib=park_gib, overrun_s=overrun_s)
        figures[f"mqfq, {overrun_s:g} s"] = _means(loads, gpu)["mqfq"]
    return figures


def _means(loads: Sequence[Load], gpu: Gpu) -> dict[str, dict[str, float]]:
    compared = [compare(load, gpu) for load in loads]
    return {
        order: {figure: round(mean(getattr(each.orders[order], figure) for each in compared), 3) for figure in _FIGURES}
        for order in compared[0].orders
    }


def _table(seeds: int, rows: list[dict[str, Any]]) -> str:
    headers = ("calls", "load", "parked in", "order", *_FIGURES.values())
    shown = [
        (
            "bursty" if row["bursty"] else "steady",
            f"{row['load']:.0%}",
            f"{row['park_gib']:g} GiB",
            row["order"],
            *(f"{row[figure]:,.0f}" if row[figure] >= 100 else f"{row[figure]:.3g}" for figure in _FIGURES),
        )
        for row in rows
    ]
    text = f"Means over {seeds} seeds; other parameters are the defaults of `gpufn simulate`.\n\n"
    return text + measure.table(headers, shown)


if __name__ == "__main__":
    main()
