from __future__ import annotations

from gpufn import gpu_function


@gpu_function(idle_timeout=0.5, scaledown_window=0.5, network="egress")
def cold_egress() -> int:
    return 1
