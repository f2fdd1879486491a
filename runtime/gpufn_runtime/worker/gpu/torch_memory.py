"""Move torch's GPU memory to pinned host memory and back.

A storage is emptied and refilled in place, so all tensors and views of it, wherever the function keeps them, are
unchanged afterwards except for their device address. Objects that contain addresses (CUDA graphs) and memory that is
invisible to Python (weights of scripted modules) cannot be moved.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

from gpufn_core.spec.units import format_bytes
from gpufn_core.weights.host_memory import host_memory

_MAX_STRAY_BYTES: Final = 256 << 20  # cuBLAS and cuDNN allocate workspaces that are no tensors
_ALIGNED: Final = 512
# Memory is pinned and released in pieces: a kernel waits while the driver releases one, 15 ms for 1 GB on an H100.
_PIECE_BYTES: Final = 64 << 20


class NotMovable(Exception):
    """Torch's memory cannot be moved, and nothing was moved. The message has the reason."""


class TorchMemory:
    """Torch's GPU memory in this process; `torch` is the module. Call `find`, then `park`, then `resume`."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._storages: list[Any] = []
        self._block: Any = None
        self._sizes: list[int] = []
        self._pinned: list[int] = []  # addresses of pieces of the block
        self.release: threading.Thread | None = None  # releases the block after a resume

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
        self._block = torch.frombuffer(host_memory(sum(map(_align, self._sizes))), dtype=torch.uint8)
        self._pin()
        for on_gpu, on_host in self._pairs():
            on_host.copy_(on_gpu, non_blocking=True)
        self._wait()
        for storage in self._storages:
            storage.resize_(0)
        gc.collect()
        torch.cuda.empty_cache()

    def resume(self) -> None:
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        for on_gpu, on_host in self._pairs():
            on_gpu.copy_(on_host, non_blocking=True)
        self._wait()
        # The call that resumed this worker does not wait for it.
        self.release = threading.Thread(target=self._release, args=(self._pinned, self._block), daemon=True)
        self.release.start()
        self._block, self._storages, self._sizes, self._pinned = None, [], [], []

    def remaining_bytes(self) -> int:
        """Return the bytes that torch still reserves, on the GPU with the most."""
        torch = self._torch
        return max(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())), default=0)

    def _pin(self) -> None:
        """Pin the block in place: torch's own pinned memory is rounded up to powers of two and never freed. If pinning
        fails, copies are slower."""
        runtime, address, size = self._torch.cuda.cudart(), self._block.data_ptr(), self._block.numel()
        for start in range(0, size, _PIECE_BYTES):
            if int(runtime.cudaHostRegister(address + start, min(_PIECE_BYTES, size - start), 0)):
                with contextlib.suppress(RuntimeError):  # CUDA reports the error again to the next kernel
                    self._torch.zeros(1, device=self._storages[0].device)
                    self._wait()
                return
            self._pinned.append(address + start)

    def _release(self, pinned: list[int], block: Any) -> None:
        """Release the pieces; the block, which the arguments keep, is freed afterwards."""
        runtime = self._torch.cuda.cudart()
        for address in pinned:
            runtime.cudaHostUnregister(address)
        del block

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """Yield the parts of each storage with their places in the block. No part crosses a piece of pinned memory."""
        place = 0
        for storage, size in zip(self._storages, self._sizes, strict=True):
            on_gpu = self._bytes(storage)
            done = 0
            while done < size:
                count = min(size - done, _PIECE_BYTES - (place + done) % _PIECE_BYTES)
                yield on_gpu[done : done + count], self._block[place + done : place + done + count]
                done += count
            place += _align(size)

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
