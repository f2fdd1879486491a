"""Rates of loading a safetensors file from the page cache onto the GPU, compared with a pinned copy."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine

_BYTES: Final = 4 << 30
_TENSOR_BYTES: Final = 64 << 20
_REPEATS: Final = 3
_LEAST_SHARE: Final = 0.8  # of the pinned copy's rate: the target of gpufn's loader


def loaders(machine: Machine) -> Finding:
    machine.real_gpu()
    machine.need_module("torch")
    import torch

    from gpufn.weights import load_safetensors

    rates = {"pinned copy": _pinned_copy_rate(torch)}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        expected = _write(torch, path)
        rates["gpufn.weights.load_safetensors"] = _BYTES / _least_s(torch, lambda: load_safetensors(path))
        loaded = load_safetensors(path)
        wrong += [
            f"{name} differs"
            for name, each in expected.items()
            if not torch.equal(loaded[name].view(torch.int16).cpu(), each)  # random bits are NaN in places
        ]
        del loaded
        if importlib.util.find_spec("safetensors"):
            from safetensors.torch import load_file

            rates["safetensors.torch.load_file"] = _BYTES / _least_s(torch, lambda: load_file(path, device="cuda"))
    share = rates["gpufn.weights.load_safetensors"] / rates["pinned copy"]
    if share < _LEAST_SHARE:
        wrong.append(f"gpufn's loader reaches {share:.2f} of the pinned copy's rate")
    return Finding(
        summary=", ".join(f"{name}: {rate / 1e9:.1f} GB/s" for name, rate in rates.items()),
        figures={"bytes_per_s": rates, "share_of_pinned_copy": share},
        tables=[Table(("loader", "GB/s"), [(name, f"{rate / 1e9:.1f}") for name, rate in rates.items()])],
        wrong=wrong,
    )


def _pinned_copy_rate(torch: Any) -> float:
    """Return bytes per second of a copy from pinned memory to the GPU."""
    pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty_like(pinned, device="cuda")
    return len(pinned) / _least_s(torch, lambda: on_gpu.copy_(pinned, non_blocking=True))


def _write(torch: Any, path: Path) -> dict[str, Any]:
    """Write random tensors of 64 MiB and return some of them. The file is then in the page cache."""
    names = [f"layers.{number}" for number in range(_BYTES // _TENSOR_BYTES)]
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
            if number in (0, 17, len(names) - 1):
                kept[name] = content
    return kept


def _least_s(torch: Any, load: Callable[[], object]) -> float:
    taken = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        loaded = load()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
        del loaded
    return min(taken)
