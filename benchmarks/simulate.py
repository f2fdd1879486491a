"""Orders of calls on one GPU, on paper: means over seeds, for steady and bursty calls and several loads.

python benchmarks/simulate.py --seeds 10
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

import measure
from gpufn.simulation.gpu import Gpu
from gpufn.simulation.run import compare
from gpufn.simulation.traces import Load

_BUSY = (0.2, 0.3, 0.4, 0.5)
_FIGURES = {
    "mean_s": "mean s",
    "p50_s": "p50 s",
    "p99_s": "p99 s",
    "slowdown": "slowdown",
    "worst_slowdown": "worst function",
    "jain": "Jain",
    "max_min": "max-min",
    "cold_starts": "cold starts",
    "busy": "GPU busy",
}


def main() -> None:
    options = measure.arguments("Orders of calls on one GPU, on paper.", seeds=10)
    about = measure.machine()
    gpu = Gpu()
    rows = [
        {"bursty": bursty, "load": busy, "order": order, **figures}
        for bursty in (False, True)
        for busy in _BUSY
        for order, figures in _over_seeds(bursty, busy, gpu, range(1, options.seeds + 1)).items()
    ]
    measure.write("simulate", {"seeds": options.seeds, "rows": rows}, _table(options.seeds, rows), about)


def _over_seeds(bursty: bool, busy: float, gpu: Gpu, seeds: Iterable[int]) -> dict[str, dict[str, float]]:
    compared = [compare(Load(bursty=bursty, busy=busy, seed=seed), gpu) for seed in seeds]
    return {
        order: {figure: round(mean(getattr(each.orders[order], figure) for each in compared), 3) for figure in _FIGURES}
        for order in compared[0].orders
    }


def _table(seeds: int, rows: list[dict[str, Any]]) -> str:
    headers = ("calls", "load", "order", *_FIGURES.values())
    shown = [
        (
            "bursty" if row["bursty"] else "steady",
            f"{row['load']:.0%}",
            row["order"],
            *(f"{row[figure]:,.0f}" if row[figure] >= 100 else f"{row[figure]:.3g}" for figure in _FIGURES),
        )
        for row in rows
    ]
    return f"Means over {seeds} seeds; the defaults of `gpufn simulate` else.\n\n" + measure.table(headers, shown)


if __name__ == "__main__":
    main()
