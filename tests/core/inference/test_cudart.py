"""Calls of the CUDA runtime, recorded by a fake library."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from gpufn_core.inference import cudart
from gpufn_core.inference.cudart import Cuda, CudaError


class _Function:
    def __init__(self, library: FakeLibrary, name: str) -> None:
        self._library = library
        self._name = name

    def __call__(self, *arguments: Any) -> Any:
        if self._name == "cudaGetErrorString":
            return b"out of memory"
        self._library.calls.append(self._name.removeprefix("cuda"))
        for argument in arguments:
            if hasattr(argument, "_obj"):
                argument._obj.value = 0x1000 + len(self._library.calls)
        return 2 if self._name in self._library.failing else 0


class FakeLibrary:
    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.calls: list[str] = []
        self._functions: dict[str, _Function] = {}

    def __getattr__(self, name: str) -> _Function:
        return self._functions.setdefault(name, _Function(self, name))


def test_a_capture_becomes_a_graph_to_launch() -> None:
    library = FakeLibrary()
    cuda = Cuda(library)
    stream = cuda.stream()
    with cuda.capture(stream) as graphs:
        cuda.copy(1, 2, 3, stream)
    cuda.launch(graphs[0], stream)
    cuda.synchronize(stream)
    assert library.calls == [
        "StreamCreateWithFlags", "StreamBeginCapture", "MemcpyAsync", "StreamEndCapture", "GraphInstantiateWithFlags",
        "GraphDestroy", "GraphLaunch", "StreamSynchronize",
    ]  # fmt: skip


@pytest.mark.parametrize("failing", ["cudaMemcpyAsync", "cudaStreamEndCapture", "cudaGraphInstantiateWithFlags"])
def test_a_capture_that_fails_is_over_and_its_error_forgotten(failing: str) -> None:
    library = FakeLibrary(failing)
    cuda = Cuda(library)
    with pytest.raises(CudaError, match=f"{failing}: out of memory"), cuda.capture(7):
        cuda.copy(1, 2, 3, 7)
    assert library.calls.count("StreamEndCapture") == 1
    assert "GetLastError" in library.calls[library.calls.index(failing.removeprefix("cuda")) :]


def test_exhausted_memory_is_an_error_with_a_message() -> None:
    with pytest.raises(CudaError, match="cudaMalloc: out of memory"):
        Cuda(FakeLibrary("cudaMalloc")).allocate(1)


def test_addresses_are_whole() -> None:
    cuda = Cuda(FakeLibrary())
    assert cuda.allocate(1) > 0x1000
    assert cuda._library.cudaFree.argtypes == (ctypes.c_void_p,), "an int would be cut to 32 bits"


class _Driver:
    def __init__(self, version: int) -> None:
        self._version = version

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802
        number._obj.value = self._version
        return 0


def test_the_driver_supports_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the runtime of CUDA 13 loads with a driver for 12, and then each call fails."""
    loaded: list[str] = []

    def load(path: str) -> Any:
        if path == "libcuda.so.1":
            return _Driver(12_080)
        loaded.append(path)
        return FakeLibrary()

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert cudart.driver_version() == 12
    Cuda()
    assert loaded == ["libcudart.so.12"]
