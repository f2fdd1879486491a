from __future__ import annotations

import threading
from pathlib import Path

import gpufn
from gpufn import Retry, gpu_function


@gpu_function(retries=Retry(3, delay_s=0.1), timeout=120)
def climb(steps: int, stop_at: int, gate: str) -> list[int]:
    """The attempt that made each step. At step `stop_at` it waits for the file `gate`."""
    ctx = gpufn.current()
    begin: tuple[int, list[int]] = ctx.restored or (0, [])
    step, attempts = begin
    while step < steps:
        if step == stop_at:
            ctx.progress(step / steps, "at the gate")
            while not Path(gate).exists():
                threading.Event().wait(0.02)
        step += 1
        attempts.append(ctx.attempt)
        ctx.checkpoint((step, attempts))
    return attempts
