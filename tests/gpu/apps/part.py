"""Functions that report the view of a worker with a part of a GPU under MPS."""

from __future__ import annotations

import torch

from gpufn import gpu_function

Seen = dict[str, int | str]


@gpu_function(gpu="any", share="mps", vram="2Gi", sm=25, max_workers=1, idle_timeout=5)
def quarter(mib: int) -> Seen:
    return look(mib)


@gpu_function(gpu="any", share="mps", vram="3Gi", sm=50, max_workers=1, idle_timeout=5)
def half(mib: int) -> Seen:
    return look(mib)


def look(mib: int) -> Seen:
    """Allocate memory. Return the number of multiprocessors, and the error if the allocation was refused."""
    try:
        torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        refused = str(error).splitlines()[0]
    else:
        refused = ""
    torch.cuda.empty_cache()
    return {"multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count, "refused": refused}
