"""Parked workers with weights of some size, and calls that resume them. With a pretended GPU the weights are a few
bytes that the hooks do not copy, so the figures do not count."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from typing import Any, Final

from gpu_check.findings import Finding, Plot, Table
from gpu_check.machine import CannotRun, Machine
from gpu_check.platform import Platform, up

_ROOM: Final = 1.2  # GPU memory needed, relative to the weights
_REPEATS: Final = 3
_NAME: Final = "gpu-check-parked"
_SOURCE: Final = """\
import uuid

import torch

from gpufn import enter, gpu_function, method

PROCESS = uuid.uuid4().hex


@gpu_function(name={name!r}, gpu="any", max_workers=1, idle_timeout=0.2, scaledown_window=0.2)
class Parked:
    @enter
    def load(self) -> None:
        self.weights = torch.randint(0, 256, ({size},), dtype=torch.uint8, device="cuda")

    @method
    def look(self) -> dict[str, int | str]:
        # In parts: torch converts its input to the sum's type first, which takes eight times the memory.
        parts = self.weights.split(1 << 28)
        return {{"process": PROCESS, "sum": sum(int(part.sum(dtype=torch.int64)) for part in parts)}}
"""
_PRETENDED: Final = """\
import uuid

from gpufn import enter, gpu_function, method, park, resume

PROCESS = uuid.uuid4().hex


@gpu_function(name={name!r}, gpu="any", max_workers=1, idle_timeout=0.2, scaledown_window=0.2)
class Parked:
    @enter
    def load(self) -> None:
        self.weights = b"1" * 100

    @park
    def out(self) -> None:
        self.weights, self.kept = b"", self.weights

    @resume
    def back(self) -> None:
        self.weights = self.kept

    @method
    def look(self) -> dict[str, int | str]:
        return {{"process": PROCESS, "sum": sum(self.weights)}}
"""


_GIB: Final = 1 << 30
_KEPT_GB: Final = (0.001, 1.0)  # nearly a context alone, and beside weights


def kept(machine: Machine) -> Finding:
    """Read from NVML, by pid, the GPU memory that a parked torch process holds. The process with small
    weights shows the part of the context; the rest is memory that torch keeps."""
    gpu = machine.real_gpu()
    machine.need_module("torch")
    rows, wrong = [], []
    for size_gb in _KEPT_GB:
        with up(machine) as platform:
            platform.deploy(_SOURCE.format(name=_NAME, size=int(size_gb * 1e9)))
            platform.invoke(f"{_NAME}.look")
            pid = _process(platform).get("pid", 0)
            running = _held_by(pid, gpu.uuid)
            platform.wait_for(_NAME, "parked")
            parked = _held_by(pid, gpu.uuid)
            report = _process(platform)
        rows.append((f"{size_gb:g} GB", running, parked, str(report.get("parked")), str(report.get("gpu_bytes"))))
        print(*rows[-1], sep="; ")  # intermediate results, in case the step times out
        if isinstance(parked, int) and parked > _GIB:
            wrong.append(f"{size_gb:g} GB: the parked process holds {parked:,} bytes, beyond the 1 GiB allowed")
    return Finding(
        summary="; ".join(f"{name}: {running} bytes running, {parked} parked" for name, running, parked, *_ in rows),
        figures={"rows": [list(row) for row in rows]},
        tables=[Table(("weights", "running, bytes", "parked, bytes", "gpufn: parked", "gpufn: gpu_bytes"), rows)],
        wrong=wrong,
    )


def _process(platform: Platform) -> dict[str, Any]:
    """Return the agent's report about the only worker."""
    processes: list[dict[str, Any]] = platform.get("/v1/nodes")["nodes"][0]["processes"]
    return next(iter(processes), {})


def _held_by(pid: int, uuid: str) -> Any:
    """Return the bytes of GPU memory that NVML reports for a process, or its answer without such a figure."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
        listed = {each.pid: each.usedGpuMemory for each in processes}
        return listed.get(pid, f"not listed: {listed}")
    except nvml.NVMLError as error:
        return str(error)
    finally:
        nvml.nvmlShutdown()


def small(machine: Machine) -> Finding:
    return check(machine, (0.1, 1.0))


def large(machine: Machine) -> Finding:
    """A step of its own, because a machine without enough memory may kill the process."""
    return check(machine, (10.0,))


def check(machine: Machine, sizes_gb: Sequence[float]) -> Finding:
    gpu = machine.gpu()
    if not machine.pretended:
        machine.need_module("torch")
    measured: dict[str, dict[str, float]] = {}
    for size_gb in sizes_gb:
        size, name = int(size_gb * 1e9), f"{size_gb:g} GB"
        if gpu.memory_bytes < size * _ROOM:
            raise CannotRun(f"{name}: needs {size * _ROOM / 1e9:.1f} GB, and the GPU has {gpu.memory_bytes / 1e9:.1f}")
        with up(machine) as platform:
            source = _PRETENDED if machine.pretended else _SOURCE
            platform.deploy(source.format(name=_NAME, size=size))
            measured[name] = _measure(platform)
            print(name, measured[name])  # intermediate results, in case the step times out
    keys = ("cold_ms", "resumed_ms", "warm_ms")
    series = {label: [each[f"{label}_ms"] for each in measured.values()] for label in ("cold", "resumed")}
    parts = (f"{name}: {each['resumed_ms']:.0f} ms instead of {each['cold_ms']:.0f}" for name, each in measured.items())
    return Finding(
        summary="a call to a parked worker of " + "; of ".join(parts),
        figures=measured,
        tables=[
            Table(
                ("weights", "cold start, ms", "parked, ms", "warm, ms"),
                [(name, *(f"{each[key]:.1f}" for key in keys)) for name, each in measured.items()],
            )
        ],
        plots=[Plot("First call, by size of the weights", "ms", list(measured), series)],
    )


def _measure(platform: Platform) -> dict[str, float]:
    """Return the latency of calls: one that finds no worker, calls to the parked worker, and the calls after those."""
    cold_s, first = platform.timed(f"{_NAME}.look")
    resumed, warm = [], []
    for _ in range(_REPEATS):
        platform.wait_for(_NAME, "parked")
        resumed.append(_look(platform, first))
        warm.append(_look(platform, first))
    return {
        "cold_ms": cold_s * 1e3,
        "resumed_ms": statistics.median(resumed) * 1e3,
        "warm_ms": statistics.median(warm) * 1e3,
    }


def _look(platform: Platform, first: Any) -> float:
    seconds, result = platform.timed(f"{_NAME}.look")
    assert result == first, f"the process or the weights changed: {result}, {first}"
    return seconds
