"""A run of ONNX Runtime on the CPU, with memory in 4 KiB pages and in 2 MiB pages.

    python benchmarks/huge_pages.py [--seconds 6] [--rounds 16]

Two processes with the same session run in turns; `--seconds` is the total over all rounds of one process. The order
alternates between rounds, and the ratio is the median over the rounds, because the machine's speed drifts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

import measure
import networks
from gpufn_core.inference.ort_threads import waiting
from gpufn_runtime.worker.engines import huge_pages

_MODELS = ("resnet18", "encoder")
_ROWS = (1, 16)
_THREADS = 2
_PAGES = ("4 KiB", "2 MiB")
_WARM_UP_RUNS = 20


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--session":
        _serve(*sys.argv[2:])
        return
    options = measure.arguments("Huge pages.", seconds=6.0, rounds=16)
    about = measure.machine()
    rows = []
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in _MODELS:
            file = Path(folder) / f"{model}.onnx"
            onnx.save(getattr(networks, model)(), file)
            for count in _ROWS:
                report, runs = _in_turns(file, count, options.seconds / options.rounds, options.rounds)
                ratio = statistics.median(huge / small for small, huge in runs)
                results[f"{model}, {count}"] = {"collapse": report, "ms": runs, "ratio": ratio}
                medians = [f"{statistics.median(column):.2f}" for column in zip(*runs, strict=True)]
                rows.append([model, count, *medians, f"{ratio:.3f}", f"{report['mib']:.0f}", f"{report['ms']:.0f}"])
    titles = ["model", "rows", *(f"ms, {pages}" for pages in _PAGES), "ratio", "MiB in huge pages", "ms to move them"]
    measure.write("huge-pages", {"threads": _THREADS, "runs": results}, measure.table(titles, rows), about)


def _in_turns(file: Path, rows: int, seconds: float, rounds: int) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """Return the report of the process with huge pages, and by round the median run of both in ms."""
    sessions = [
        subprocess.Popen(
            [sys.executable, __file__, "--session", str(file), str(rows), pages],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for pages in _PAGES
    ]  # fmt: skip
    reports = [json.loads(_request(session, "")) for session in sessions]
    medians = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        by_pages = {which: float(_request(sessions[which], str(seconds))) for which in order}
        medians.append((by_pages[0], by_pages[1]))
    for session in sessions:
        session.communicate()
    return reports[1], medians


def _request(session: subprocess.Popen[str], line: str) -> str:
    assert session.stdin is not None
    assert session.stdout is not None
    session.stdin.write(line + "\n")
    session.stdin.flush()
    return session.stdout.readline()


def _serve(file: str, rows: str, pages: str) -> None:
    """Serve lines from stdin: for a number of seconds, print the median run; for an empty line, print the report."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _THREADS
    for entry, value in waiting(onnxruntime.__version__).items():
        options.add_session_config_entry(entry, value)
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = networks.inputs(Path(file).stem, int(rows))
    for _ in range(_WARM_UP_RUNS):
        session.run(None, inputs)
    start = time.perf_counter()
    moved = huge_pages.collapse() if pages == "2 MiB" else 0
    about = {"mib": moved / 2**20, "ms": (time.perf_counter() - start) * 1e3}
    for line in sys.stdin:
        print(_median_ms(session, inputs, float(line)) if line.strip() else json.dumps(about), flush=True)


def _median_ms(session: onnxruntime.InferenceSession, inputs: dict[str, Any], seconds: float) -> float:
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        session.run(None, inputs)
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken)


if __name__ == "__main__":
    main()
