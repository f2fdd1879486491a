"""Pass a worker's share of GPU memory on to libraries that size their memory by the whole GPU.

Under MPS the driver limits the memory that a process can allocate and sees as free, but reports the total of the whole
GPU. torch, JAX, TensorFlow and vLLM take a fraction of the total, so each would exceed the limit.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import math
import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FRACTION = "GPUFN_GPU_MEMORY_FRACTION"
_TORCH_CUDA = "torch.cuda"


def apply(vram_bytes: int, total_bytes: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's memory fraction, now or when it is imported, and the variables of the others unless the function's
    `env` has them. GPUFN_GPU_MEMORY_FRACTION has the share from 0 to 1, for libraries that accept it as an argument."""
    fraction = math.floor(10_000 * min(1.0, vram_bytes / total_bytes)) / 10_000
    environ[FRACTION] = str(fraction)
    environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(fraction))  # JAX
    environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # TensorFlow has no variable for a limit
    if (cuda := sys.modules.get(_TORCH_CUDA)) is not None:
        _limit_torch(cuda, fraction)
    else:
        sys.meta_path.insert(0, _TorchFinder(fraction))


def _limit_torch(cuda: Any, fraction: float) -> None:
    """Set the fraction when torch initializes CUDA: to set it earlier would initialize CUDA."""
    cuda._lazy_call(lambda: cuda.set_per_process_memory_fraction(fraction))


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Limits torch after its import, once."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TORCH_CUDA:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader, self._fraction)
        return spec


class _TorchLoader(importlib.abc.Loader):
    """Wraps the loader of torch.cuda for the import."""

    def __init__(self, loader: Any, fraction: float) -> None:
        self._loader = loader
        self._fraction = fraction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _limit_torch(module, self._fraction)
