"""The part of torch that moving its memory needs: storages on a GPU that counts its allocations."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any


class FakeTorch:
    """`Tensor(b"...")` is on the GPU. `stray`: bytes there that belong to no tensor; `can_pin`: whether the driver pins
    memory."""

    strided, uint8 = "strided", "uint8"

    def __init__(self) -> None:
        self.stray = 0
        self.cached = 0
        self.can_pin = True
        self.is_spoilt = False
        self.pinned: set[int] = set()
        self.storages: list[Storage] = []
        self.Tensor = type("Tensor", (Tensor,), {"torch": self})
        self.cuda = SimpleNamespace(
            CUDAGraph=type("CUDAGraph", (), {}),
            is_initialized=lambda: True,
            device_count=lambda: 1,
            memory_allocated=lambda device: self.allocated(),
            memory_reserved=lambda device: self.allocated() + self.cached,
            empty_cache=self._empty_cache,
            synchronize=lambda device: None,
            cudart=lambda: SimpleNamespace(cudaHostRegister=self._pin, cudaHostUnregister=self.pinned.remove),
        )

    def allocated(self) -> int:
        return self.stray + sum(len(each.data) for each in self.storages if each.device == "cuda:0")

    def empty(self, size: int, *, dtype: str, device: str = "cpu") -> Any:
        storage = Storage(self, bytearray(size), device)
        return self.Tensor(storage)

    def frombuffer(self, buffer: Any, *, dtype: str) -> Any:
        return self.empty(len(buffer), dtype=dtype)

    def zeros(self, size: int, *, device: str) -> None:
        """The kernel that receives the earlier error."""
        if self.is_spoilt:
            self.is_spoilt = False
            raise RuntimeError("CUDA error: out of memory")

    def _pin(self, address: int, size: int, flags: int) -> int:
        if self.can_pin:
            self.pinned.add(address)
        self.is_spoilt = not self.can_pin
        return 0 if self.can_pin else 2

    def _empty_cache(self) -> None:
        self.cached = 0


class Storage:
    _addresses = itertools.count(4096, 4096)

    def __init__(self, torch: FakeTorch, data: bytearray, device: str, *, is_own: bool = True) -> None:
        self.torch = torch
        self.data = data
        self.device = device
        self.address = next(self._addresses)
        self.is_own = is_own
        torch.storages.append(self)

    def nbytes(self) -> int:
        return len(self.data)

    def data_ptr(self) -> int:
        return self.address

    def resizable(self) -> bool:
        return self.is_own

    def resize_(self, size: int) -> None:
        if self.device != "cpu":
            self.torch.cached += len(self.data)
        self.data[:] = bytes(size)


class Tensor:
    torch: FakeTorch
    layout = "strided"

    def __init__(self, source: bytes | Storage, start: int = 0, size: int | None = None) -> None:
        self._storage = source if isinstance(source, Storage) else Storage(self.torch, bytearray(source), "cuda:0")
        self._start = start
        self._size = size

    @property
    def is_cuda(self) -> bool:
        return self._storage.device != "cpu"

    @property
    def content(self) -> bytes:
        end = None if self._size is None else self._start + self._size
        return bytes(self._storage.data[self._start : end])

    def untyped_storage(self) -> Storage:
        return self._storage

    def data_ptr(self) -> int:
        return self._storage.address

    def numel(self) -> int:
        return len(self.content)

    def __getitem__(self, part: slice) -> Tensor:
        return type(self)(self._storage, part.start, part.stop - part.start)

    def set_(self, storage: Storage) -> Tensor:
        self._storage = storage
        return self

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        size = source.numel()
        assert size == self.numel()
        self._storage.data[self._start : self._start + size] = source.content
