"""Time of a call by the kind and size of its argument: on one platform, or on two checkouts in turns.

    python benchmarks/arguments.py [--other PYTHON] [--rounds 5]

`--other` is the interpreter of another checkout's environment. Each platform has its own home and port. Both run at the
same time, and each round calls one and then the other. Prints medians and their ratio, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

APP = """
from typing import Any
from gpufn import gpu_function

@gpu_function(min_workers=1, max_workers=1, timeout=120)
def size(value: Any) -> int:
    return len(value)
"""
CLIENT = """
import json, sys, time
import numpy, pandas
sys.path.insert(0, sys.argv[1])
from app import size

def value_of(kind, count):
    if kind == "bytes":
        return bytes(count)
    if kind == "array":
        return numpy.zeros(count // 8)
    return pandas.DataFrame({name: numpy.zeros(count // 32) for name in "abcd"})

for line in sys.stdin:
    kind, count, calls = json.loads(line)
    value = value_of(kind, count)
    size.remote(value)
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        size.remote(value)
        times.append(time.perf_counter() - started)
    print(json.dumps(times), flush=True)
"""
CASES = [
    (kind, count, calls)
    for kind in ("bytes", "array", "frame")
    for count, calls in ((1 << 10, 200), (100 << 10, 100), (1 << 20, 40), (8 << 20, 10), (40 << 20, 3))
]


@contextlib.contextmanager
def platform(python: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a platform with `size` deployed, and a client process that makes the calls read from its standard input."""
    folder.mkdir()
    (folder / "app.py").write_text(APP)
    (folder / "client.py").write_text(CLIENT)
    environ = {**os.environ, "GPUFN_HOME": str(folder / "home"), "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    environ.pop("GPUFN_URL", None)

    def gpufn(*arguments: str) -> None:
        subprocess.run([python, "-m", "gpufn", *arguments], env=environ, check=True, stdout=subprocess.DEVNULL)

    gpufn("up", "--port", "0", "--detach")
    try:
        environ["GPUFN_URL"] = json.loads((folder / "home" / "up.json").read_text())["url"]
        gpufn("deploy", str(folder / "app.py"))
        with subprocess.Popen(
            [python, str(folder / "client.py"), str(folder)],
            env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as client:  # fmt: skip
            yield client
            assert client.stdin is not None
            client.stdin.close()
    finally:
        gpufn("down")


def measured(client: subprocess.Popen[str], case: tuple[str, int, int]) -> list[float]:
    assert client.stdin is not None and client.stdout is not None  # noqa: PT018
    client.stdin.write(json.dumps(case) + "\n")
    client.stdin.flush()
    return [float(each) for each in json.loads(client.stdout.readline())]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pythons = [sys.executable, *([options.other] if options.other else [])]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(platform(each, Path(folder) / str(n))) for n, each in enumerate(pythons)]
        for case in CASES:
            times: list[list[float]] = [[] for _ in clients]
            for _ in range(options.rounds):
                for client, samples in zip(clients, times, strict=True):
                    samples.append(statistics.median(measured(client, case)))
            medians = [statistics.median(samples) for samples in times]
            row = {"kind": case[0], "bytes": case[1], "ms": [round(each * 1000, 3) for each in medians]}
            rows.append(row | ({"ratio": round(medians[0] / medians[1], 3)} if options.other else {}))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
