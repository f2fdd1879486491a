"""What torch keeps on a worker's GPUs, moved to pinned memory of the host and back.

A storage is emptied and filled again in place, so every tensor and view of it, wherever the function keeps it, is as it
was afterwards, but for its address on the device. What refers to addresses (a CUDA graph), and what Python does not see
(a scripted module's weights), cannot be moved.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

_MOST_STRAY_BYTES = 256 << 20  # what cuBLAS and cuDNN take for themselves is no tensor
_ALIGNED = 512


class NotMovable(Exception):
    """Nothing has been moved; the message says why."""


class TorchMemory:
    """`torch` is the module. `find` first, then `park`, then `resume`."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._storages: list[Any] = []
        self._block: Any = None
        self._sizes: list[int] = []
        self._is_pinned = False

    def find(self) -> int:
        """How many bytes there are to move. Raises NotMovable."""
        torch = self._torch
        found: dict[int, Any] = {}
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, torch.cuda.CUDAGraph):
                raise NotMovable("it has a CUDA graph, which is tied to addresses on the GPU")
            if issubclass(kind, torch.Tensor) and thing.is_cuda and thing.layout == torch.strided:
                with contextlib.suppress(RuntimeError):  # one that wraps others has none
                    storage = thing.untyped_storage()
                    if storage.nbytes():
                        found[storage.data_ptr()] = storage
        self._storages = list(found.values())
        if not all(storage.resizable() for storage in self._storages):
            raise NotMovable("some of torch's memory on the GPU belongs to another library")
        self._sizes = [storage.nbytes() for storage in self._storages]
        stray = sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))) - sum(self._sizes)
        if stray > _MOST_STRAY_BYTES:
            raise NotMovable(f"torch has {stray >> 20} MiB on the GPU that are no tensor of Python's")
        return sum(map(_aligned, self._sizes))

    def park(self) -> None:
        torch = self._torch
        self._block = torch.empty(sum(map(_aligned, self._sizes)), dtype=torch.uint8)
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

    def left_bytes(self) -> int:
        """What torch still holds of the GPU that has most of it."""
        torch = self._torch
        return max(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())), default=0)

    def _pin(self) -> None:
        """The memory that is there, for torch's own pinned memory comes in powers of two and is never given back. Where
        it cannot be pinned, copies are slower."""
        size = self._block.numel()
        runtime = self._torch.cuda.cudart()
        self._is_pinned = size > 0 and not int(runtime.cudaHostRegister(self._block.data_ptr(), size, 0))
        if not self._is_pinned:
            with contextlib.suppress(RuntimeError):  # CUDA tells of it once more, to the next kernel
                self._torch.zeros(1, device=self._storages[0].device)
                self._wait()

    def _parts(self) -> list[Any]:
        """Where each storage has its place in the block."""
        parts, start = [], 0
        for size in self._sizes:
            parts.append(self._block[start : start + size])
            start += _aligned(size)
        return parts

    def _bytes(self, storage: Any) -> Any:
        return self._torch.empty(0, dtype=self._torch.uint8, device=storage.device).set_(storage)

    def _wait(self) -> None:
        for device in {str(storage.device) for storage in self._storages}:
            self._torch.cuda.synchronize(device)


def torch_memory() -> TorchMemory | None:
    """None while torch has nothing to do with a GPU in this process."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return TorchMemory(torch)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
