"""Replaces libcuda.so.1 in workers, from their PYTHONPATH, by a stand-in: a client of the simulated MPS daemon."""

# ruff: noqa: N802

from __future__ import annotations

import ctypes
import os
import subprocess
from typing import Any

from tests.runtime.worker.fake_cuda import FakeCuda

_load = ctypes.CDLL


class Client(FakeCuda):
    def cuInit(self, flags: int) -> int:
        subprocess.run([os.environ["PLAYED_MPS_CONTROL"]], input=f"connect {os.getpid()}", text=True, check=True)
        return super().cuInit(flags)


def _library(name: Any, *arguments: Any, **options: Any) -> Any:
    if name == "libcuda.so.1":
        return Client(os.environ, multiprocessors=58, memory_bytes=24 << 30)
    return _load(name, *arguments, **options)


ctypes.CDLL = _library  # type: ignore[assignment,misc]
