"""What parking rests on: weights to pinned memory of the host and back, and copies while the GPU computes.

Plain torch, in the step's own process; `parking` has the same with workers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpu_check.findings import Finding, Plot, Table
from gpu_check.machine import CannotRun, Machine

_ROOM: Final = 1.2  # of the GPU, over what is parked
_REPEATS: Final = 3
_OVERLAP_GB: Final = 1.0
_CHUNKS: Final = 16
# torch rounds pinned memory up to a power of two, so 10 GB in one piece would pin 16 GiB.
_PINNED_BYTES: Final = 16 << 20
_PAGEABLE_BYTES: Final = 1 << 30  # used again and again: only its speed counts


def park_small(machine: Machine) -> Finding:
    return _park(machine, (0.1, 1.0))


def park_large(machine: Machine) -> Finding:
    """In a step of its own: a machine that lacks the memory may end the process."""
    return _park(machine, (10.0,))


def _park(machine: Machine, sizes_gb: Sequence[float]) -> Finding:
    torch = _torch(machine)
    measured: dict[str, dict[str, float]] = {}
    rows = []
    for size_gb in sizes_gb:
        size, name = int(size_gb * 1e9), f"{size_gb:g} GB"
        free, _ = torch.cuda.mem_get_info()
        if free < size * _ROOM:
            raise CannotRun(f"{name}: needs {size * _ROOM / 1e9:.1f} GB of the GPU, and {free / 1e9:.1f} are free")
        found = measured[name] = _parked_and_resumed(torch, size)
        rows.append((
            name,
            *(f"{found[key] * 1e3:,.0f} ms" for key in ("pin_s", "park_s", "resume_s")),
            *(f"{size / found[key] / 1e9:.1f} GB/s" for key in ("park_s", "resume_s")),
            f"{found['pageable_s'] * 1e3:,.0f} ms",
        ))  # fmt: skip
    series = {
        what: [each[key] * 1e3 for each in measured.values()]
        for what, key in (("park", "park_s"), ("resume", "resume_s"), ("pin", "pin_s"))
    }
    told = (f"{name}: park {each['park_s']:.2f} s, resume {each['resume_s']:.2f} s" for name, each in measured.items())
    return Finding(
        summary="; ".join(told),
        figures=measured,
        tables=[Table(("weights", "pin", "park", "resume", "out", "back", "out, not pinned"), rows)],
        plots=[Plot("Park and resume by size of the weights", "ms", list(measured), series)],
    )


def overlap(machine: Machine) -> Finding:
    """Copies to the GPU on a stream of their own, while another computes for as long."""
    torch = _torch(machine)
    source = torch.empty(int(_OVERLAP_GB * 1e9), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    side = torch.cuda.Stream()
    pairs = list(zip(target.chunk(_CHUNKS), source.chunk(_CHUNKS), strict=True))

    def copy() -> None:
        with torch.cuda.stream(side):
            for to, part in pairs:
                to.copy_(part, non_blocking=True)

    def compute(times: int) -> None:
        for _ in range(times):
            a @ a

    def together() -> None:
        copy()
        compute(times)

    copy_s = _median_s(torch, copy)
    times = max(round(20 * copy_s / _median_s(torch, lambda: compute(20))), 1)
    compute_s = _median_s(torch, lambda: compute(times))
    both_s = _median_s(torch, together)
    hidden = max(0.0, min(1.0, (copy_s + compute_s - both_s) / min(copy_s, compute_s)))
    rows = [(what, f"{seconds * 1e3:.1f}") for what, seconds in
            (("copy alone", copy_s), ("compute alone", compute_s), ("together", both_s))]  # fmt: skip
    return Finding(
        summary=f"{hidden:.0%} of the copy is hidden behind computing "
        f"({copy_s * 1e3:.0f} + {compute_s * 1e3:.0f} ms apart, {both_s * 1e3:.0f} ms together)",
        figures={"copy_s": copy_s, "compute_s": compute_s, "both_s": both_s, "hidden": hidden},
        tables=[Table((f"{_OVERLAP_GB:g} GB to the GPU", "ms"), rows)],
    )


def _torch(machine: Machine) -> Any:
    machine.real_gpu()
    machine.need_module("torch")
    import torch

    if not torch.cuda.is_available():
        raise CannotRun(f"torch {torch.__version__} does not see the GPU")
    return torch


def _parked_and_resumed(torch: Any, size: int) -> dict[str, float]:
    """Seconds. Parked is what the device has given back, resumed what it has again; both are compared in the end."""
    began = time.perf_counter()
    host = [torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(-(-size // _PINNED_BYTES))]
    pin_s = time.perf_counter() - began
    pageable = torch.empty(min(size, _PAGEABLE_BYTES), dtype=torch.uint8)
    pageable.fill_(0)  # so that its pages are there
    park, resume, out = [], [], []
    for seed in range(_REPEATS):
        torch.manual_seed(seed)
        weights = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        check = int(weights.sum(dtype=torch.int64))
        torch.cuda.synchronize()
        began = time.perf_counter()
        for part in weights.split(len(pageable)):
            pageable[: len(part)].copy_(part)
        torch.cuda.synchronize()
        out.append(time.perf_counter() - began)
        began = time.perf_counter()
        for part, pinned in zip(weights.split(_PINNED_BYTES), host, strict=True):
            pinned[: len(part)].copy_(part, non_blocking=True)
        torch.cuda.synchronize()
        del weights, part
        torch.cuda.empty_cache()
        park.append(time.perf_counter() - began)
        began = time.perf_counter()
        back = torch.empty(size, dtype=torch.uint8, device="cuda")
        for part, pinned in zip(back.split(_PINNED_BYTES), host, strict=True):
            part.copy_(pinned[: len(part)], non_blocking=True)
        torch.cuda.synchronize()
        resume.append(time.perf_counter() - began)
        assert int(back.sum(dtype=torch.int64)) == check, "what came back is not what was parked"
        del back, part
        torch.cuda.empty_cache()
    return {
        "pin_s": pin_s,
        "park_s": statistics.median(park),
        "resume_s": statistics.median(resume),
        "pageable_s": statistics.median(out),
    }


def _median_s(torch: Any, work: Callable[[], object]) -> float:
    """Of `_REPEATS`, after one that is not counted."""
    taken = []
    for _ in range(_REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])
