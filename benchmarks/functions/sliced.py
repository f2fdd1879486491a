"""Functions on a simulated GPU: a lock that processes hold in slices of 2 ms, as a driver's time slices."""

from __future__ import annotations

import fcntl
import os
import time

from gpufn import gpu_function

_SLICE_S = 0.002
_ENV = {"PLAYED_GPU": os.environ.get("PLAYED_GPU", "/dev/null")}


def _use_gpu(seconds: float) -> None:
    with open(os.environ["PLAYED_GPU"], "w") as lock:
        for _ in range(round(seconds / _SLICE_S)):
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(_SLICE_S)
            fcntl.flock(lock, fcntl.LOCK_UN)


@gpu_function(gpu="any", share="time", min_workers=3, max_workers=3, env=_ENV)
def many() -> None:
    _use_gpu(0.01)


@gpu_function(gpu="any", share="time", max_workers=1, env=_ENV)
def long() -> None:
    _use_gpu(0.1)


@gpu_function(gpu="any", share="time", max_workers=1, env=_ENV)
def short() -> None:
    _use_gpu(0.01)
