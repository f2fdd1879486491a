"""Three functions on one simulated GPU (functions/sliced.py), called without pause: throughput and latency of each.
With one turn per worker, which means no turns, and with fewer.

    python benchmarks/turns.py --seconds 10
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

import measure

_GPU = {"uuid": "GPU-0", "type": "gpu", "kind": "played", "memory_bytes": 1 << 34}
_SERVICE_S = {"many": 0.01, "long": 0.1, "short": 0.01}
_CLIENTS = {"many": 12, "long": 2, "short": 2}
_WORKERS = {"many": 3, "long": 1, "short": 1}
_TURNS = (5, 2, 1)  # five turns for five workers: three of "many", and one of each other function


def main() -> None:
    options = measure.arguments("Turns on a simulated GPU.", seconds=10.0)
    about = measure.machine()
    rows = [row for turns in _TURNS for row in _measured(turns, options.seconds)]
    headers = ("turns", "function", "workers, clients", "calls/s", "of the GPU", "p50 ms", "p99 ms")
    shown = [
        (
            row["turns"],
            row["function"],
            f"{_WORKERS[row['function']]}, {_CLIENTS[row['function']]}",
            f"{row['calls_per_s']:.1f}",
            f"{row['share']:.0%}",
            f"{row['p50_ms']:.0f}",
            f"{row['p99_ms']:.0f}",
        )
        for row in rows
    ]
    measure.write("turns", {"seconds": options.seconds, "rows": rows}, measure.table(headers, shown), about)


def _measured(turns: int, seconds: float) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile() as lock:
        environ = {"GPUFN_DEVICES": json.dumps([_GPU]), "GPUFN_TURNS_PER_GPU": str(turns), "PLAYED_GPU": lock.name}
        with measure.gpufn_up(**environ) as platform:
            measure.deploy_file(platform, Path(__file__).parent / "functions" / "sliced.py")
            took = _load(platform.base, seconds)
    used_s = {name: len(each) * _SERVICE_S[name] for name, each in took.items()}
    return [
        {
            "turns": turns,
            "function": name,
            "calls_per_s": round(len(each) / seconds, 1),
            "share": round(used_s[name] / sum(used_s.values()), 3),
            "p50_ms": round(1000 * each[len(each) // 2], 1),
            "p99_ms": round(1000 * each[len(each) * 99 // 100], 1),
        }
        for name, each in took.items()
    ]


def _load(url: str, seconds: float) -> dict[str, list[float]]:
    """Return the durations of each function's calls, sorted."""
    took: dict[str, list[float]] = {name: [] for name in _SERVICE_S}

    def client(name: str, until: float) -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while (start := time.monotonic()) < until:
                http.post(f"/v1/functions/{name}/invoke", json={}).raise_for_status()
                took[name].append(time.monotonic() - start)

    for name, workers in _WORKERS.items():  # wait until all workers are ready
        httpx.post(f"{url}/v1/functions/{name}/invoke", json={}, timeout=60).raise_for_status()
        while httpx.get(f"{url}/v1/functions/{name}").json()["workers"]["ready"] < workers:
            time.sleep(0.1)
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=client, args=(name, until)) for name, count in _CLIENTS.items() for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: sorted(each) for name, each in took.items()}


if __name__ == "__main__":
    main()
