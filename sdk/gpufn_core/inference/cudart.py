"""Bindings to the part of the CUDA runtime that running an engine needs, from the library in TensorRT's wheels."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

_NON_BLOCKING = 1  # cudaStreamNonBlocking: no implicit synchronization with the default stream
_ANY_DIRECTION = 4  # cudaMemcpyDefault: the direction follows from the addresses
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: calls of other threads do not break a capture
_VERSIONS = (13, 12)  # major versions, the newest first

_ADDRESS, _SIZE, _HANDLE = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudaMalloc": (ctypes.POINTER(_ADDRESS), _SIZE),
    "cudaFree": (_ADDRESS,),
    "cudaMallocHost": (ctypes.POINTER(_ADDRESS), _SIZE),
    "cudaFreeHost": (_ADDRESS,),
    "cudaMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, ctypes.c_int, _HANDLE),
    "cudaStreamCreateWithFlags": (ctypes.POINTER(_HANDLE), ctypes.c_uint),
    "cudaStreamDestroy": (_HANDLE,),
    "cudaStreamSynchronize": (_HANDLE,),
    "cudaStreamBeginCapture": (_HANDLE, ctypes.c_int),
    "cudaStreamEndCapture": (_HANDLE, ctypes.POINTER(_HANDLE)),
    "cudaGraphInstantiateWithFlags": (ctypes.POINTER(_HANDLE), _HANDLE, ctypes.c_ulonglong),
    "cudaGraphDestroy": (_HANDLE,),
    "cudaGraphLaunch": (_HANDLE, _HANDLE),
    "cudaGraphExecDestroy": (_HANDLE,),
    "cudaGetLastError": (),
}


class CudaError(RuntimeError):
    pass


class Cuda:
    """The CUDA runtime. Addresses and handles are ints. Methods raise CudaError with the driver's message."""

    def __init__(self, library: Any = None) -> None:
        self._library = library or _load()
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, size: int) -> int:
        return self._create("cudaMalloc", max(size, 1))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def allocate_pinned(self, size: int) -> int:
        """Allocate host memory that the device can access directly."""
        return self._create("cudaMallocHost", max(size, 1))

    def free_pinned(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def stream(self) -> int:
        return self._create("cudaStreamCreateWithFlags", _NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Queue a copy in the stream and return at once."""
        self._call("cudaMemcpyAsync", to, source, size, _ANY_DIRECTION, stream)

    def synchronize(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", stream)

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[list[int]]:
        """Capture the work that is queued in the stream inside the `with`, instead of running it. Afterwards the list
        has its graph. Raises CudaError if something cannot be captured."""
        graphs: list[int] = []
        self._call("cudaStreamBeginCapture", stream, _THREAD_LOCAL)
        try:
            yield graphs
        except BaseException:
            with contextlib.suppress(CudaError):  # the capture must end, even if it is broken
                self._call("cudaGraphDestroy", self._end_capture(stream))
            self._library.cudaGetLastError()  # clear the error, which would fail the next launch
            raise
        graph = self._end_capture(stream)
        try:
            graphs.append(self._create("cudaGraphInstantiateWithFlags", graph, 0))
        finally:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: int, stream: int) -> None:
        self._call("cudaGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def _end_capture(self, stream: int) -> int:
        graph = _HANDLE()
        self._call("cudaStreamEndCapture", stream, ctypes.byref(graph))
        return graph.value or 0

    def _create(self, name: str, *arguments: int) -> int:
        handle = _HANDLE()
        self._call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()
            raise CudaError(f"{name}: {self._library.cudaGetErrorString(code).decode()}")


def _load() -> Any:
    """Load the newest library that the driver supports: the machine's, or else the one of NVIDIA's wheels. Raises
    OSError."""
    supported = driver_version()
    for version in _VERSIONS:
        if supported is not None and version > supported:
            continue  # it would load, and each call would fail with error 35
        name = f"libcudart.so.{version}"
        for path in (name, *_in_wheels(name)):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(path)
    usable = _VERSIONS[0] if supported is None else supported
    raise OSError(f"libcudart.so.{usable} or older was not found: install TensorRT with its CUDA runtime")


def driver_version(library: Any = None) -> int | None:
    """Return the newest major version of CUDA that the driver supports, or None without a driver."""
    with contextlib.suppress(OSError):
        number = ctypes.c_int()
        if (library or ctypes.CDLL("libcuda.so.1")).cuDriverGetVersion(ctypes.byref(number)) == 0:
            return number.value // 1000
    return None


def _in_wheels(name: str) -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from glob.glob(os.path.join(folder, "*", "lib", name))
