"""Submitted calls per GPUFN_SYNC setting: accepted calls per second, and the latency of a 202.

    python benchmarks/sync.py [--seconds 2] [--rounds 3]

One platform per setting, all up at the same time, measured in turns at 1 and 64 connections. The calls stay queued: no
node has the GPU that they need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections import defaultdict
from typing import Any

import measure

SETTINGS = ("always", "2s", "never")
CONNECTIONS = (1, 64)
_SUBMIT = measure.Post("", b'{"x": 0}', {"Content-Type": "application/json"})


def main() -> None:
    options = measure.arguments("Accepted calls per setting of GPUFN_SYNC.", seconds=2.0, rounds=3)
    about = measure.machine()
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        targets = {}
        for setting in SETTINGS:
            server = stack.enter_context(measure.gpufn_up(GPUFN_SYNC=setting))
            measure.deploy(server, "nowhere")
            url = f"{server.url}/v1/functions/nowhere/submit"
            targets[setting] = measure.Server(setting, url, server.process, post=_SUBMIT)
        for _ in range(options.rounds):
            for connections in CONNECTIONS:
                for setting, target in targets.items():
                    load = measure.wrk(target, connections, options.seconds)
                    runs[f"{setting}, at {connections}"].append(dataclasses.asdict(load))
    measure.write("sync", {"rounds": options.rounds, "accepted": runs}, _table(runs), about)


def _table(runs: dict[str, list[dict[str, Any]]]) -> str:
    def median(name: str, field: str) -> float:
        return float(statistics.median(run[field] for run in runs[name]))

    rows = []
    for name in runs:
        base = f"never, at {name.rpartition(' ')[2]}"
        figures = [median(name, field) for field in ("per_second", "p50_ms", "p99_ms")]
        rows.append([name, *figures, round(figures[0] / median(base, "per_second"), 2)])
    return measure.table(["GPUFN_SYNC, connections", "calls/s", "p50 ms", "p99 ms", "of never's calls/s"], rows)


if __name__ == "__main__":
    main()
