"""Concurrent ONNX Runtime sessions, by how their threads wait for each other within a run.

    python benchmarks/spinning.py [--seconds 2] [--rounds 3]

One, two or four processes, as on a machine with as many models, each with two threads on the same two cores, run after
run. The time that one process gains by spinning is lost by the others.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import onnx
import onnxruntime

import measure
import networks
from gpufn_core.inference.ort_threads import spin_config

_MODELS = ("resnet18", "encoder")
_PROCESSES = (1, 2, 4)
_THREADS = 2
_WAYS: dict[str, dict[str, str]] = {
    "sleep": {"session.intra_op.allow_spinning": "0"},
    "spin 20 us, then sleep (gpufn)": spin_config("1.26"),
    "spin 100 us, then sleep": {"session.intra_op.spin_duration_us": "100"},
    "spin in runs": {"session.force_spinning_stop": "1"},
    "spin (ONNX Runtime's own)": {},
}
_WARM_UP_RUNS = 20


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--session":
        _run(*sys.argv[2:])
        return
    options = measure.arguments("How threads wait in a run.", seconds=2.0, rounds=3)
    about = measure.machine()
    runs: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        for model in _MODELS:
            file = Path(folder) / f"{model}.onnx"
            onnx.save(getattr(networks, model)(), file)
            for _ in range(options.rounds):
                for processes in _PROCESSES:
                    for way in _WAYS:
                        runs[f"{model}, {processes}"][way].append(_side_by_side(file, way, processes, options.seconds))
    measure.write("spinning", {"threads": _THREADS, "runs": runs}, _table(runs), about)


def _side_by_side(file: Path, way: str, processes: int, seconds: float) -> tuple[float, float]:
    """Return the runs per second of all processes together, and the mean of their medians in ms."""
    command = [sys.executable, __file__, "--session", str(file), way, str(seconds)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    reports = [json.loads(each.communicate()[0]) for each in started]
    return sum(runs / seconds for runs, _ in reports), statistics.mean(p50_ms for _, p50_ms in reports)


def _run(file: str, way: str, seconds: str) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _THREADS
    for entry, value in _WAYS[way].items():
        options.add_session_config_entry(entry, value)
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = networks.inputs(Path(file).stem, 1)
    for _ in range(_WARM_UP_RUNS):
        session.run(None, inputs)
    taken: list[float] = []
    end = time.perf_counter() + float(seconds)
    while (start := time.perf_counter()) < end:
        session.run(None, inputs)
        taken.append((time.perf_counter() - start) * 1e3)
    print(json.dumps([len(taken), statistics.median(taken)]))


def _table(runs: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    rows = [
        [case, way, *(f"{statistics.median(column):,.2f}" for column in zip(*measured, strict=True))]
        for case, ways in runs.items()
        for way, measured in ways.items()
    ]
    return measure.table(["model, processes", "threads", "runs/s of all", "p50 ms"], rows)


if __name__ == "__main__":
    main()
