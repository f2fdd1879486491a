"""Functions that report the view of a worker that takes turns on a GPU."""

from __future__ import annotations

import torch

from gpufn import gpu_function


@gpu_function(gpu="any", share="time", max_workers=1, idle_timeout=5)
def multiply(size: int) -> dict[str, str | float]:
    a = torch.ones(size, size, device="cuda")
    return {"device": str(a.device), "mean": float((a @ a).mean())}


@gpu_function(gpu="any", share="time", max_workers=1, idle_timeout=5)
def whole() -> int:
    """Multiprocessors of the GPU."""
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


@gpu_function(gpu="any", share="time", max_workers=1, idle_timeout=5, retries=0)
def spoil(broken: bool) -> float:
    """Fail with a device-side assertion, which makes the CUDA context unusable."""
    a = torch.ones(8, 8, device="cuda")
    if broken:
        a = a[torch.tensor([1 << 40], device="cuda")]
    return float(a.sum())
