"""Functions whose torch tensors are on a GPU while their worker parks and resumes."""

from __future__ import annotations

import os

import torch

from gpufn import enter, gpu_function, method

_table = None


@gpu_function(gpu="any", share="time", max_workers=1, idle_timeout=0.2, scaledown_window=0.2)
class Net:
    @enter
    def load(self) -> None:
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.LSTM(4096, 64)).cuda().eval()
        self.tied = self.net[0].weight

    @method
    def run(self) -> dict[str, float | bool]:
        with torch.inference_mode():
            out, _ = self.net(torch.ones(1, 4096, device="cuda"))
        return {"pid": os.getpid(), "sum": round(float(out.sum()), 3), "tied": self.tied is self.net[0].weight}


@gpu_function(gpu="any", share="time", max_workers=1, idle_timeout=0.2, scaledown_window=0.2)
def looked_up(index: int) -> list[int]:
    """Return an entry of a table that a plain function keeps as a global."""
    global _table  # noqa: PLW0603
    if _table is None:
        _table = torch.arange(1 << 20, device="cuda") * 2
    return [os.getpid(), int(_table[index])]
