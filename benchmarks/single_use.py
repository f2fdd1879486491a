"""A new process for each call (`max_calls=1`) against one process for all calls, and against Python itself.

    python benchmarks/single_use.py [--rounds 3] [--calls 60] [--pause 0.02]

The functions are called in turns, one call at a time. In the pause between two calls the platform starts the next
worker. Without a pause a call waits for it.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

import measure

_APP = """\
from gpufn import gpu_function


@gpu_function
def shared() -> int:
    return 1


@gpu_function(max_calls=1)
def single() -> int:
    return 1
"""
_WARM_UP = 3


def main() -> None:
    options = measure.arguments("A process per call.", rounds=3, calls=60, pause=0.02)
    about = measure.machine()
    with measure.gpufn_up() as platform, tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "app.py"
        app.write_text(_APP)
        measure.deploy_file(platform, app)
        with httpx.Client(base_url=platform.url, timeout=60) as client:
            cases = {
                "one process for all calls": (_invoke(client, "shared"), options.pause),
                "max_calls=1": (_invoke(client, "single"), options.pause),
                "max_calls=1, without a pause": (_invoke(client, "single"), 0.0),
                "python -c pass": (_start_python, 0.0),
            }
            rounds: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(int(options.rounds)):
                for name, (call, pause_s) in cases.items():
                    rounds[name].append(_median_ms(call, int(options.calls), pause_s))
    result = {name: [round(each, 2) for each in medians] for name, medians in rounds.items()}
    rows = [[name, *medians] for name, medians in result.items()]
    headers = ["median of a call, ms", *(f"round {number}" for number in range(1, int(options.rounds) + 1))]
    measure.write("single-use", {"calls": options.calls, "ms": result}, measure.table(headers, rows), about)


def _invoke(client: httpx.Client, function: str) -> Callable[[], Any]:
    def invoke() -> None:
        client.post(f"/v1/functions/{function}/invoke", json={}).raise_for_status()

    return invoke


def _start_python() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def _median_ms(call: Callable[[], Any], calls: int, pause_s: float) -> float:
    for _ in range(_WARM_UP):
        call()
    times = []
    for _ in range(calls):
        time.sleep(pause_s)
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    main()
