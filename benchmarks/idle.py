"""Cost of the idle platform: memory and CPU, empty and with many deployed functions.

    python benchmarks/idle.py [--seconds 20] [--functions 200]

RSS counts shared pages in every process that maps them. PSS divides them among the processes, so its sum is the memory
in use.
"""

from __future__ import annotations

import time
from typing import Any

import measure

_FUNCTION = """\
from gpufn import gpu_function


@gpu_function()
def idle_{number}(x: int = {number}) -> int:
    return x
"""
_SETTLE_S = 5.0


def main() -> None:
    options = measure.arguments("The idle platform.", seconds=20.0, functions=200)
    about = measure.machine()
    # Without templates: their number is the operator's choice, and each costs what it imports.
    with measure.gpufn_up(GPUFN_TEMPLATES="0") as platform:
        empty = _idle(platform, options.seconds)
        start = time.perf_counter()
        measure.deploy_many(platform, _FUNCTION, options.functions)
        deploy_s = time.perf_counter() - start
        full = _idle(platform, options.seconds)
    result = {"functions": options.functions, "deploy_s": round(deploy_s, 1), "empty": empty, "deployed": full}
    measure.write("idle", result, _tables(result), about)


def _idle(platform: measure.Server, seconds: float) -> dict[str, dict[str, float]]:
    """Return by process and in total: MiB of memory, percent of one core."""
    time.sleep(_SETTLE_S)
    before = measure.usage(platform.process.pid)
    time.sleep(seconds)
    after = measure.usage(platform.process.pid)
    rows: dict[str, dict[str, float]] = {}
    for pid, now in after.items():
        used = now.cpu_s - (before[pid].cpu_s if pid in before else 0.0)
        for name in (now.name, "total"):
            row = rows.setdefault(name, {"rss_mib": 0.0, "pss_mib": 0.0, "cpu_percent": 0.0})
            row["rss_mib"] += now.rss_bytes / 2**20
            row["pss_mib"] += now.pss_bytes / 2**20
            row["cpu_percent"] += used / seconds * 100
    return {name: {key: round(value, 2) for key, value in row.items()} for name, row in rows.items()}


def _tables(result: dict[str, Any]) -> str:
    rows = [
        [name, *(f"{result[part].get(name, {}).get(key, 0):.1f}" for part in ("empty", "deployed") for key in _KEYS)]
        for name in [*(set(result["deployed"]) - {"total"}), "total"]
    ]
    headers = ["process", *(f"{title}, {state}" for state in ("empty", "deployed") for title in _KEYS.values())]
    return f"{result['functions']} functions deployed in {result['deploy_s']} s.\n\n" + measure.table(headers, rows)


_KEYS = {"rss_mib": "RSS MiB", "pss_mib": "PSS MiB", "cpu_percent": "CPU %"}


if __name__ == "__main__":
    main()
