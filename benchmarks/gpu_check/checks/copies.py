"""The copies behind parking: weights to pinned host memory and back, and copies while the GPU computes.

Plain torch, in the step's own process; `parking` measures the same with workers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpu_check.findings import Finding, Plot, Table
from gpu_check.machine import CannotRun, Machine

_ROOM: Final = 1.2  # free GPU memory needed, relative to the parked size
_REPEATS: Final = 3
_OVERLAP_GB: Final = 1.0
_CHUNKS: Final = 16
# torch rounds pinned memory up to a power of two, so 10 GB in one piece would pin 16 GiB.
_PINNED_BYTES: Final = 16 << 20
_PAGEABLE_BYTES: Final = 1 << 30  # reused for every part: only the speed counts


def park_small(machine: Machine) -> Finding:
    return _park(machine, (0.1, 1.0))


def park_large(machine: Machine) -> Finding:
    """A step of its own, because a machine without enough memory may kill the process."""
    return _park(machine, (10.0,))


def _park(machine: Machine, sizes_gb: Sequence[float]) -> Finding:
    torch = _torch(machine)
    measured: dict[str, dict[str, float]] = {}
    rows = []
    for size_gb in sizes_gb:
        size, name = int(size_gb * 1e9), f"{size_gb:g} GB"
        free, _ = torch.cuda.mem_get_info()
        if free < size * _ROOM:
            raise CannotRun(f"{name}: needs {size * _ROOM / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free")
        timings = measured[name] = _parked_and_resumed(torch, size)
        rows.append((
            name,
            *(f"{timings[key] * 1e3:,.0f} ms" for key in ("pin_s", "park_s", "resume_s")),
            *(f"{size / timings[key] / 1e9:.1f} GB/s" for key in ("park_s", "resume_s")),
            f"{timings['pageable_s'] * 1e3:,.0f} ms",
        ))  # fmt: skip
    series = {
        label: [each[key] * 1e3 for each in measured.values()]
        for label, key in (("park", "park_s"), ("resume", "resume_s"), ("pin", "pin_s"))
    }
    parts = (f"{name}: park {each['park_s']:.2f} s, resume {each['resume_s']:.2f} s" for name, each in measured.items())
    return Finding(
        summary="; ".join(parts),
        figures=measured,
        tables=[Table(("weights", "pin", "park", "resume", "out", "back", "out, not pinned"), rows)],
        plots=[Plot("Park and resume by size of the weights", "ms", list(measured), series)],
    )


def overlap(machine: Machine) -> Finding:
    """Copy to the GPU on one stream while another computes for the same time."""
    torch = _torch(machine)
    source = torch.empty(int(_OVERLAP_GB * 1e9), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    copy_stream = torch.cuda.Stream()
    pairs = list(zip(target.chunk(_CHUNKS), source.chunk(_CHUNKS), strict=True))

    def copy() -> None:
        with torch.cuda.stream(copy_stream):
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
    rows = [(label, f"{seconds * 1e3:.1f}") for label, seconds in
            (("copy alone", copy_s), ("compute alone", compute_s), ("together", both_s))]  # fmt: skip
    return Finding(
        summary=f"{hidden:.0%} of the copy overlaps with computing "
        f"({copy_s * 1e3:.0f} + {compute_s * 1e3:.0f} ms separately, {both_s * 1e3:.0f} ms together)",
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
    """Return timings in seconds. Parking ends when the device has freed the memory, resuming when the data is back. The
    data is compared at the end."""
    started = time.perf_counter()
    host = [torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(-(-size // _PINNED_BYTES))]
    pin_s = time.perf_counter() - started
    pageable = torch.empty(min(size, _PAGEABLE_BYTES), dtype=torch.uint8)
    pageable.fill_(0)  # to fault in its pages
    park, resume, out = [], [], []
    for seed in range(_REPEATS):
        torch.manual_seed(seed)
        weights = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        check = _sum(torch, weights)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for part in weights.split(len(pageable)):
            pageable[: len(part)].copy_(part)
        torch.cuda.synchronize()
        out.append(time.perf_counter() - started)
        started = time.perf_counter()
        for part, pinned in zip(weights.split(_PINNED_BYTES), host, strict=True):
            pinned[: len(part)].copy_(part, non_blocking=True)
        torch.cuda.synchronize()
        del weights, part
        torch.cuda.empty_cache()
        park.append(time.perf_counter() - started)
        started = time.perf_counter()
        back = torch.empty(size, dtype=torch.uint8, device="cuda")
        for part, pinned in zip(back.split(_PINNED_BYTES), host, strict=True):
            part.copy_(pinned[: len(part)], non_blocking=True)
        torch.cuda.synchronize()
        resume.append(time.perf_counter() - started)
        assert _sum(torch, back) == check, "the resumed weights differ from the parked ones"
        del back, part
        torch.cuda.empty_cache()
    return {
        "pin_s": pin_s,
        "park_s": statistics.median(park),
        "resume_s": statistics.median(resume),
        "pageable_s": statistics.median(out),
    }


def _sum(torch: Any, weights: Any) -> int:
    """Return the sum of the bytes, in parts: torch converts its input to the sum's type, which takes eight times the
    memory."""
    return sum(int(part.sum(dtype=torch.int64)) for part in weights.split(_PAGEABLE_BYTES // 4))


def _median_s(torch: Any, work: Callable[[], object]) -> float:
    """Return the median of `_REPEATS`, after one discarded run."""
    taken = []
    for _ in range(_REPEATS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])
