"""A gang whose rank 1 dies at its start."""

from __future__ import annotations

import os

from gpufn import gpu_function

if os.environ.get("RANK") == "1":
    os._exit(7)


@gpu_function(nodes=2, max_workers=1)
def broken() -> None:
    pass
