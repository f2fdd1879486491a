"""Copies through pinned buffers, with torch on the CPU and a substitute for its CUDA parts."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufn_core.weights.staging import Plan, Source, Staging
from tests.waiting import until

PLAN = Plan(threads=3, chunk_bytes=4096, buffers=2)


class Cuda:
    """`pinned` counts registrations of each address. Copies run at once."""

    def __init__(self, torch: Any, *, pins: bool = True) -> None:
        self.pins = pins
        self.pinned: Counter[int] = Counter()
        self.allocate = threading.Event()
        self.allocate.set()
        self.torch = SimpleNamespace(
            uint8=torch.uint8,
            frombuffer=torch.frombuffer,
            device=torch.device,
            empty=self.empty,
            cuda=SimpleNamespace(
                cudart=lambda: self,
                current_stream=lambda device: SimpleNamespace(synchronize=lambda: None),
                Stream=lambda device: SimpleNamespace(synchronize=lambda: None),
                Event=lambda: SimpleNamespace(synchronize=lambda: None, record=lambda stream: None),
                stream=self.stream,
            ),
        )
        self._empty = torch.empty

    def empty(self, size: int, *, dtype: Any, device: Any) -> Any:
        assert device == "cuda"
        assert self.allocate.wait(30)
        return self._empty(size, dtype=dtype)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if not self.pins:
            return 2
        self.pinned[address] += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.pinned[address] -= 1
        return 0


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def _source(path: Path, size: int) -> tuple[Any, bytes]:
    data = bytes(range(256)) * (size // 256 + 1)
    path.write_bytes(b"header" + data[:size])
    return path.open("rb"), data[:size]


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("size", [1, 4096, 100_001])
def test_the_data_of_each_file_arrives_and_the_buffers_serve_all(
    torch: Any, tmp_path: Path, pins: bool, size: int
) -> None:
    cuda = Cuda(torch, pins=pins)
    phases: Counter[str] = Counter()
    staging = Staging(cuda.torch, "cuda", PLAN, lambda phase: phases.update([phase]))
    for name in "ab":
        file, data = _source(tmp_path / name, size)
        with file:
            assert bytes(staging.load(Source(file.fileno(), 6, size)).numpy()) == data
    assert all(count == 1 for count in cuda.pinned.values())
    assert len(cuda.pinned) <= PLAN.threads * PLAN.buffers
    staging.close()
    until(lambda: phases["released"])
    assert not any(cuda.pinned.values())
    assert (phases["allocated"], phases["filled"]) == (2, 2)


def test_the_first_reads_do_not_wait_for_the_memory_of_the_gpu(torch: Any, tmp_path: Path) -> None:
    cuda = Cuda(torch)
    cuda.allocate.clear()

    def on_phase(phase: str) -> None:
        if phase == "read":
            cuda.allocate.set()

    staging = Staging(cuda.torch, "cuda", PLAN, on_phase)
    file, data = _source(tmp_path / "a", 9000)
    with file:
        assert bytes(staging.load(Source(file.fileno(), 6, len(data))).numpy()) == data
    staging.close()


def test_an_error_of_the_gpu_or_of_the_file_ends_all_threads(torch: Any, tmp_path: Path) -> None:
    cuda = Cuda(torch)
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
