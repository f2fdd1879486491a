"""A run of ONNX Runtime on the CPU with its memory in pages of 4 KiB, and in pages of 2 MiB.

    python benchmarks/huge_pages.py [--seconds 6] [--rounds 16]

Two processes with the same session each, in turns; `--seconds` is for all rounds of one of them. The order changes from
round to round, and the ratio is the median of the rounds': the machine's speed changes faster than one would like.
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
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in _MODELS:
            file = Path(folder) / f"{model}.onnx"
            onnx.save(getattr(networks, model)(), file)
            for count in _ROWS:
                told, runs = _in_turns(file, count, options.seconds / options.rounds, options.rounds)
                ratio = statistics.median(huge / small for small, huge in runs)
                found[f"{model}, {count}"] = {"collapse": told, "ms": runs, "ratio": ratio}
                medians = [f"{statistics.median(column):.2f}" for column in zip(*runs, strict=True)]
                rows.append([model, count, *medians, f"{ratio:.3f}", f"{told['mib']:.0f}", f"{told['ms']:.0f}"])
    titles = ["model", "rows", *(f"ms, {pages}" for pages in _PAGES), "ratio", "MiB in huge pages", "ms to move them"]
    measure.write("huge-pages", {"threads": _THREADS, "runs": found}, measure.table(titles, rows), about)


def _in_turns(file: Path, rows: int, seconds: float, rounds: int) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """What the one with huge pages says of them, and by round the median run of both in ms."""
    sessions = [
        subprocess.Popen(
            [sys.executable, __file__, "--session", str(file), str(rows), pages],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for pages in _PAGES
    ]  # fmt: skip
    told = [json.loads(_asked(session, "")) for session in sessions]
    found = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        by_pages = {which: float(_asked(sessions[which], str(seconds))) for which in order}
        found.append((by_pages[0], by_pages[1]))
    for session in sessions:
        session.communicate()
    return told[1], found


def _asked(session: subprocess.Popen[str], line: str) -> str:
    assert session.stdin is not None
    assert session.stdout is not None
    session.stdin.write(line + "\n")
    session.stdin.flush()
    return session.stdout.readline()


def _serve(file: str, rows: str, pages: str) -> None:
    """The median run of as many seconds as each line says; for an empty one, get ready."""
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
