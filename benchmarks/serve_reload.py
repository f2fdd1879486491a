"""How long `gpufn serve` takes from a save to the first call that runs the new code, on a running platform.

    GPUFN_URL=http://127.0.0.1:8090 python benchmarks/serve_reload.py [--saves 30] [--functions 1]

A client calls the function all the time, one call after the other. The time of a save ends when a response has the new
version. `failed` counts calls without a result: it must be 0. The parts are measured by the reload itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from gpufn.cli.develop import reload
from gpufn.client.client import Client
from gpufn_core.domain.revision import Lease
from gpufn_core.spec.naming.names import Home

ENV = "dev-bench"
SOURCE = """from gpufn import gpu_function

@gpu_function(max_workers=2)
def version() -> int:
    return VERSION
"""
OTHER = """
@gpu_function
def other_{number}() -> int:
    return {number}
"""


def write(file: Path, version: int, functions: int) -> None:
    others = "".join(OTHER.format(number=number) for number in range(1, functions))
    file.write_text(SOURCE.replace("VERSION", str(version)) + others)


class Caller:
    """Calls the function without a pause. `first` has the time of the first response of each version."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}
        self.calls = self.failed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._call)
        self._thread.start()

    def _call(self) -> None:
        with Client() as client:
            while not self._stop.is_set():
                self.calls += 1
                try:
                    version = json.loads(client.invoke_raw(f"{ENV}/default/version", b"{}").body)
                except Exception:
                    self.failed += 1
                    continue
                self.first.setdefault(version, time.monotonic())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def measure(folder: Path, saves: int, functions: int) -> dict[str, object]:
    file = folder / "app.py"
    write(file, 0, functions)
    command = [sys.executable, "-m", "gpufn", "serve", str(file), "--env", ENV]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"{ENV}/default/version@"):
            break
    threading.Thread(target=process.stdout.read, daemon=True).start()
    time.sleep(1)
    caller = Caller()
    saved: dict[int, float] = {}
    for version in range(1, saves + 1):
        saved[version] = time.monotonic()
        write(file, version, functions)
        give_up = time.monotonic() + 10
        while version not in caller.first and time.monotonic() < give_up:
            time.sleep(0.002)
        time.sleep(0.5)
    caller.stop()
    process.send_signal(signal.SIGINT)
    code = process.wait(20)
    times = sorted((caller.first[version] - saved[version]) * 1000 for version in saved)
    return {
        "functions": functions,
        "saves": saves,
        "median_ms": round(statistics.median(times)),
        "p90_ms": round(times[int(len(times) * 0.9) - 1]),
        "min_ms": round(times[0]),
        "max_ms": round(times[-1]),
        "calls": caller.calls,
        "failed": caller.failed,
        "exit_code": code,
    }


def parts(folder: Path, repeats: int = 10) -> dict[str, float]:
    """Return the median time of each event since the start of a reload."""
    reload.prepare()
    file, lease = folder / "app.py", Lease("bench", 30.0)
    request = reload.Request(str(file), [], Home(ENV), lease)
    at: dict[str, list[float]] = {}
    for version in range(100, 100 + repeats):
        write(file, version, 1)
        started, running = time.monotonic(), reload.Reload(request)
        for _ in range(1000):
            for event in running.events(0.01):
                name = event.text or event.kind
                at.setdefault(name, []).append((time.monotonic() - started) * 1000)
            if "ended" in at and len(at["ended"]) == version - 99:
                break
        running.stop()
    with Client() as client:
        client.delete(f"{ENV}/default/version")
    return {f"{name}_ms": round(statistics.median(times[1:])) for name, times in at.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--saves", type=int, default=30)
    parser.add_argument("--functions", type=int, default=1)
    options = parser.parse_args()
    os.environ["GPUFN_ENV"] = ENV
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), options.saves, options.functions)
        result["since_the_start_of_the_reload"] = parts(Path(name))
    cores = os.cpu_count()
    result["machine"] = f"{platform.system()} {platform.machine()}, {cores} cores, Python {platform.python_version()}"
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
