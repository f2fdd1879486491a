"""A gang that reduces a tensor over all of its ranks with gloo, and one that does nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import gpufn
from gpufn import Retry, enter, gpu_function, method


@gpu_function(nodes=2, max_workers=1, idle_timeout=600, retries=Retry(5, delay_s=0.1))
class Reducer:
    @enter
    def join(self) -> None:
        dist.init_process_group("gloo")

    @method
    def noop(self) -> None:
        pass

    @method
    def reduce(self, elements: int) -> dict[str, float]:
        """Return the sum of `rank + 1` over the ranks, and the milliseconds of an all_reduce."""
        tensor = torch.full((elements,), float(dist.get_rank() + 1))
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor)
        return {"sum": tensor[-1].item(), "ms": 1000 * (time.perf_counter() - started)}

    @method
    def train(self, steps: int, step_s: float, folder: str) -> dict[str, list[int]]:
        """Reduce once per step; returns the steps at which attempts began."""
        ctx = gpufn.current()
        restored: tuple[list[int], int] = ctx.restored or ([], 0)
        began, step = restored
        began.append(step)
        Path(folder, f"{ctx.attempt}-{dist.get_rank()}").write_text(f"{os.getpid()}")
        while step < steps:
            time.sleep(step_s)
            dist.all_reduce(torch.ones(1))
            step += 1
            ctx.checkpoint((began, step))
        return {"began": began}


@gpu_function(max_workers=1, idle_timeout=600)
def alone() -> None:
    pass
