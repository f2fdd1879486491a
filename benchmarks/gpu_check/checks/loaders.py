"""Rates of loading a safetensors file onto the GPU, compared with a pinned copy, and the time of each phase.

1. the first load of the process, which starts CUDA
2. each plan of the loader, from the page cache, the least of three
3. the default plan and one with more threads, with the file out of the page cache

The phases are the times since the beginning of a load, in milliseconds. A phase of the threads ends with the last one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine
from gpufn_core.weights.safetensors import read_header
from gpufn_core.weights.staging import Plan, Source, Staging

_BYTES: Final = 4 << 30
_PRETENDED_BYTES: Final = 192 << 20
_TENSOR_BYTES: Final = 64 << 20
_REPEATS: Final = 3
_LEAST_SHARE: Final = 0.8  # of the pinned copy's rate: the target of gpufn's loader
_DEFAULT: Final = Plan()
_PLANS: Final = {
    "default: 12 threads, 2 buffers of 4 MiB, huge pages": _DEFAULT,
    "4 KiB pages": _DEFAULT._replace(huge_pages=False),
    "buffers of 1 MiB": _DEFAULT._replace(chunk_bytes=1 << 20),
    "buffers of 2 MiB": _DEFAULT._replace(chunk_bytes=2 << 20),
    "buffers of 8 MiB": _DEFAULT._replace(chunk_bytes=8 << 20),
    "3 buffers": _DEFAULT._replace(buffers=3),
    "4 threads": _DEFAULT._replace(threads=4),
    "8 threads": _DEFAULT._replace(threads=8),
    "16 threads": _DEFAULT._replace(threads=16),
    "24 threads": _DEFAULT._replace(threads=24),
    "24 threads, buffers of 2 MiB": _DEFAULT._replace(threads=24, chunk_bytes=2 << 20),
    "as before 2026-11-26: buffers of 8 MiB, 4 KiB pages": _DEFAULT._replace(chunk_bytes=8 << 20, huge_pages=False),
}
_COLD: Final = ("default: 12 threads, 2 buffers of 4 MiB, huge pages", "24 threads")
_PHASES: Final = ("allocated", "read", "pinned", "copied", "filled", "returned", "released")


def loaders(machine: Machine) -> Finding:
    machine.gpu()
    machine.need_module("torch")
    import torch

    from gpufn.weights import load_safetensors

    size = _PRETENDED_BYTES if machine.pretended else _BYTES
    device = machine.torch_device
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        expected = _write(torch, path, size)
        runs = {"first in the process: it starts CUDA": _load(torch, path, _DEFAULT, device)}
        rates = {"pinned copy": _pinned_copy_rate(torch, device)}
        rates["gpufn.weights.load_safetensors"] = size / _least_s(torch, lambda: load_safetensors(path, device))
        loaded = load_safetensors(path, device)
        wrong += [
            f"{name} differs"
            for name, each in expected.items()
            if not torch.equal(loaded[name].view(torch.int16).cpu(), each)  # random bits are NaN in places
        ]
        del loaded
        if importlib.util.find_spec("safetensors"):
            from safetensors.torch import load_file

            rates["safetensors.torch.load_file"] = size / _least_s(torch, lambda: load_file(path, device=device))
        for name, plan in _PLANS.items():
            runs[name] = min(
                (_load(torch, path, plan, device) for _ in range(_REPEATS)), key=lambda run: run["returned"]
            )
        for name in _COLD:
            _drop(path)
            runs[f"{name}; not in the page cache"] = _load(torch, path, _PLANS[name], device)
    share = rates["gpufn.weights.load_safetensors"] / rates["pinned copy"]
    if share < _LEAST_SHARE and not machine.pretended:
        wrong.append(f"gpufn's loader reaches {share:.2f} of the pinned copy's rate")
    return Finding(
        summary=", ".join(f"{name}: {rate / 1e9:.1f} GB/s" for name, rate in rates.items()),
        figures={"bytes_per_s": rates, "share_of_pinned_copy": share, "phases_s": runs},
        tables=[
            Table(("loader", "GB/s"), [(name, f"{rate / 1e9:.1f}") for name, rate in rates.items()]),
            _phase_table(runs, size),
        ],
        wrong=wrong,
    )


def _load(torch: Any, path: Path, plan: Plan, device: str) -> dict[str, float]:
    """Load the file, and return the seconds from the beginning to the end of each phase."""
    ended: dict[str, float] = {}
    has_released = threading.Event()
    started = time.perf_counter()

    def on_phase(phase: str) -> None:
        ended[phase] = time.perf_counter() - started
        if phase == "released":
            has_released.set()

    staging = Staging(torch, device, plan, on_phase)
    with path.open("rb") as file:
        _, start = read_header(file, path.stat().st_size)
        loaded = staging.load(Source(file.fileno(), start, path.stat().st_size - start))
    _synchronize(torch)
    staging.close()
    on_phase("returned")
    del loaded
    has_released.wait(30)
    return ended


def _phase_table(runs: dict[str, dict[str, float]], size: int) -> Table:
    rows = [
        (name, f"{size / run['returned'] / 1e9:.1f}", *(_ms(run.get(phase)) for phase in _PHASES))
        for name, run in runs.items()
    ]
    return Table(("plan", "GB/s", *(f"{phase}, ms" for phase in _PHASES)), rows)


def _drop(path: Path) -> None:
    """Remove the file from the page cache, unless it is in memory (tmpfs)."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _pinned_copy_rate(torch: Any, device: str) -> float:
    """Return bytes per second of a copy from pinned memory to the GPU."""
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=device == "cuda")
    on_gpu = torch.empty_like(pinned, device=device)
    return len(pinned) / _least_s(torch, lambda: on_gpu.copy_(pinned, non_blocking=True))


def _write(torch: Any, path: Path, size: int) -> dict[str, Any]:
    """Write random tensors of 64 MiB and return some of them. The file is then in the page cache."""
    names = [f"layers.{number}" for number in range(size // _TENSOR_BYTES)]
    header = {
        name: {
            "dtype": "BF16",
            "shape": [_TENSOR_BYTES // 2],
            "data_offsets": [number * _TENSOR_BYTES, (number + 1) * _TENSOR_BYTES],
        }
        for number, name in enumerate(names)
    }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # as the library pads it
    base = torch.randint(-(1 << 15), 1 << 15, (_TENSOR_BYTES // 2,), dtype=torch.int16)
    kept = {}
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for number, name in enumerate(names):
            content = base.roll(number)
            file.write(memoryview(content.numpy()))
            if number in (0, len(names) // 2, len(names) - 1):
                kept[name] = content
    return kept


def _least_s(torch: Any, load: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        _synchronize(torch)
        started = time.perf_counter()
        loaded = load()
        _synchronize(torch)
        taken.append(time.perf_counter() - started)
        del loaded
    return min(taken)


def _synchronize(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
