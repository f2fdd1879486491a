"""Copies through pinned buffers, with a stand-in for torch: a copy happens when something waits for its stream."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpufn_core.weights.staging import Plan, Source, Staging
from tests.waiting import until

PLAN = Plan(threads=3, chunk_bytes=4096, buffers=2)


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.queue: list[Callable[[], None]] = []

    def synchronize(self) -> None:
        queue, self.queue = self.queue, []
        for copy in queue:
            copy()


class Event:
    def record(self, stream: Stream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        self._stream.synchronize()


class Tensor:
    device = "cuda"

    def __init__(self, array: Any, cuda: Cuda) -> None:
        self._array = array
        self._cuda = cuda

    def __getitem__(self, part: slice) -> Tensor:
        return Tensor(self._array[part], self._cuda)

    def numel(self) -> int:
        return int(self._array.size)

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._cuda.current.stream.queue.append(lambda: np.copyto(self._array, source._array))

    def content(self) -> bytes:
        return bytes(self._array)


class Cuda:
    """`pinned` counts registrations of each address."""

    def __init__(self, *, pins: bool = True) -> None:
        self.pins = pins
        self.pinned: Counter[int] = Counter()
        self.allocate = threading.Event()
        self.allocate.set()
        self.current = threading.local()
        self.torch = SimpleNamespace(
            uint8=np.uint8,
            frombuffer=lambda memory, *, dtype: Tensor(np.frombuffer(memory, dtype), self),
            device=lambda name: SimpleNamespace(type=name),
            empty=self.empty,
            cuda=SimpleNamespace(
                cudart=lambda: self,
                current_stream=lambda device: Stream(),
                Stream=Stream,
                Event=Event,
                stream=self.stream,
            ),
        )

    def empty(self, size: int, *, dtype: Any, device: Any) -> Tensor:
        assert device == "cuda"
        assert self.allocate.wait(30)
        return Tensor(np.zeros(size, dtype), self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current.stream = stream
        yield

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.pins:
            return 2
        self.pinned[address] += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.pinned[address] -= 1
        return 0


def _source(path: Path, size: int) -> tuple[Any, bytes]:
    data = bytes(range(251)) * (size // 251 + 1)  # each chunk differs
    path.write_bytes(b"header" + data[:size])
    return path.open("rb"), data[:size]


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("size", [1, 4096, 100_001])
def test_the_data_of_each_file_arrives_and_the_buffers_serve_all(tmp_path: Path, pins: bool, size: int) -> None:
    cuda = Cuda(pins=pins)
    phases: Counter[str] = Counter()
    staging = Staging(cuda.torch, "cuda", PLAN, lambda phase: phases.update([phase]))
    for name in "ab":
        file, data = _source(tmp_path / name, size)
        with file:
            assert staging.load(Source(file.fileno(), 6, size)).content() == data
    assert all(count == 1 for count in cuda.pinned.values())
    assert len(cuda.pinned) <= PLAN.threads * PLAN.buffers
    staging.close()
    until(lambda: phases["released"])
    assert not any(cuda.pinned.values())
    assert (phases["allocated"], phases["filled"]) == (2, 2)


def test_the_first_reads_do_not_wait_for_the_memory_of_the_gpu(tmp_path: Path) -> None:
    cuda = Cuda()
    cuda.allocate.clear()

    def on_phase(phase: str) -> None:
        if phase == "read":
            cuda.allocate.set()

    staging = Staging(cuda.torch, "cuda", PLAN, on_phase)
    file, data = _source(tmp_path / "a", 9000)
    with file:
        assert staging.load(Source(file.fileno(), 6, len(data))).content() == data
    staging.close()


def test_an_error_of_the_gpu_or_of_the_file_ends_all_threads(tmp_path: Path) -> None:
    cuda = Cuda()
    staging = Staging(cuda.torch, "cuda", PLAN)
    file, data = _source(tmp_path / "a", 50_000)
    with file:
        with pytest.raises(ValueError, match="ended at byte"):
            staging.load(Source(file.fileno(), 6, len(data) + 1))
        cuda.torch.empty = lambda *args, **options: (_ for _ in ()).throw(MemoryError("no room"))
        with pytest.raises(MemoryError):
            staging.load(Source(file.fileno(), 6, len(data)))
    staging.close()
    until(lambda: not any(cuda.pinned.values()))
