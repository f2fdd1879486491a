from __future__ import annotations

import numpy as np

from gpufn import gpu_function


@gpu_function(idle_timeout=0.5, scaledown_window=0.5)
def cold_numpy() -> float:
    return float(np.ones(8).sum())
