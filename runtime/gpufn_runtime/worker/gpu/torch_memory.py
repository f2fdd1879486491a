"""Move torch's GPU memory to pinned host memory and back.

A storage is emptied and refilled in place, so all tensors and views of it, wherever the function keeps them, are
unchanged afterwards except for their device address. Objects that contain addresses (CUDA graphs) and memory that is
invisible to Python (weights of scripted modules) cannot be moved.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

from gpufn_core.spec.units import format_bytes

_MAX_STRAY_BYTES = 256 << 20  # cuBLAS and cuDNN allocate workspaces that are no tensors
_ALIGNED = 512


class NotMovable(Exception):
    """Torch's memory cannot be moved, and nothing was moved. The message has the reason."""


class TorchMemory:
    """Torch's GPU memory in this process; `torch` is the module. Call `find`, then `park`, then `resume`."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._storages: list[Any] = []
        self._block: Any = None
        self._sizes: list[int] = []
        self._is_pinned = False

    def find(self) -> int:
        """Find all storages; returns the number of bytes to move. Raises NotMovable."""
        torch = self._torch
        storages: dict[int, Any] = {}
        for candidate in gc.get_objects():
            kind = type(candidate)
            if issubclass(kind, torch.cuda.CUDAGraph):
                raise NotMovable("it has a CUDA graph, which contains GPU addresses")
            if issubclass(kind, torch.Tensor) and candidate.is_cuda and candidate.layout == torch.strided:
                with contextlib.suppress(RuntimeError):  # a tensor that wraps others has no storage
                    storage = candidate.untyped_storage()
                    if storage.nbytes():
                        storages[storage.data_ptr()] = storage
        self._storages = list(storages.values())
        if not all(storage.resizable() for storage in self._storages):
            raise NotMovable("some of torch's memory on the GPU belongs to another library")
        self._sizes = [storage.nbytes() for storage in self._storages]
        stray = sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))) - sum(self._sizes)
        if stray > _MAX_STRAY_BYTES:
            raise NotMovable(f"torch has {format_bytes(stray)} on the GPU that belong to no Python tensor")
        return sum(map(_align, self._sizes))

    def park(self) -> None:
        torch = self._torch
        self._block = torch.empty(sum(map(_align, self._sizes)), dtype=torch.uint8)
        self._pin()
        for storage, part in zip(self._storages, self._parts(), strict=True):
            part.copy_(self._bytes(storage), non_blocking=True)
        self._wait()
        for storage in self._storages:
            storage.resize_(0)
        gc.collect()
        torch.cuda.empty_cache()

    def resume(self) -> None:
        for storage, size, part in zip(self._storages, self._sizes, self._parts(), strict=True):
            storage.resize_(size)
            self._bytes(storage).copy_(part, non_blocking=True)
        self._wait()
        if self._is_pinned:
            self._torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())
        self._block, self._storages, self._sizes = None, [], []

    def remaining_bytes(self) -> int:
        """Return the bytes that torch still reserves, on the GPU with the most."""
        torch = self._torch
        return max(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())), default=0)

    def _pin(self) -> None:
        """Pin the block in place: torch's own pinned memory is rounded up to powers of two and never freed. If pinning
        fails, copies are slower."""
        size = self._block.numel()
        runtime = self._torch.cuda.cudart()
        self._is_pinned = size > 0 and not int(runtime.cudaHostRegister(self._block.data_ptr(), size, 0))
        if not self._is_pinned:
            with contextlib.suppress(RuntimeError):  # CUDA reports the error again to the next kernel
                self._torch.zeros(1, device=self._storages[0].device)
                self._wait()

    def _parts(self) -> list[Any]:
        """Return each storage's slice of the block."""
        parts, start = [], 0
        for size in self._sizes:
            parts.append(self._block[start : start + size])
            start += _align(size)
        return parts

    def _bytes(self, storage: Any) -> Any:
        return self._torch.empty(0, dtype=self._torch.uint8, device=storage.device).set_(storage)

    def _wait(self) -> None:
        for device in {str(storage.device) for storage in self._storages}:
            self._torch.cuda.synchronize(device)


def torch_memory() -> TorchMemory | None:
    """Return this process's torch memory, or None if torch has not used a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return TorchMemory(torch)


def _align(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
