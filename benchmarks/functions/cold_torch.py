from __future__ import annotations

import torch

from gpufn import gpu_function


@gpu_function(idle_timeout=0.5, scaledown_window=0.5)
def cold_torch() -> float:
    return float(torch.ones(8).sum())
