"""Engines that run on TensorRT.

Each slot has an execution context, a stream, and for each tensor a device buffer and a pinned host buffer, as large as
the profiles' largest inputs require. A run uses its slot's stream:

1. if the shapes differ from the slot's last run: set the profile and each input's shape, read the outputs' shapes.
   Enlarge the buffers of outputs that need more: an output may shrink while an input grows
2. copy inputs into the pinned buffers
3. copy to the device, `execute_async_v3`, copy back: enqueued in the first run; captured as a CUDA graph in the second
   consecutive run with the same shapes; a single launch of the graph from then on
4. wait for the stream; copy outputs out of the pinned buffers

A graph is valid only while its context is unchanged, so other shapes drop it. Slots overlap: one copies while another
computes.

The shape of some outputs depends on the data (NonZero, NonMaxSuppression). TensorRT requests their memory during
`execute_async_v3` from an IOutputAllocator, and reports the shape before that call returns. It waits for the data in
between, so such engines run without a graph. Source: IOutputAllocator and IExecutionContext in NVIDIA's API
documentation, and the signatures of the 11.4 bindings.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.inference.cudart import Cuda, CudaError
from gpufn_core.spec.model_spec import TensorSpec
from gpufn_runtime.worker.engines.base import Array, Arrays
from gpufn_runtime.worker.engines.tensors import dtype_of

_MAX_LINES = 20
_Shapes = tuple[tuple[int, ...], ...]


def open_engine(manifest: EngineManifest, folder: Path, *, slots: int, cores: float) -> TensorRTSession:
    """Load an engine. Raises ImportError or OSError without the libraries, EngineRefused, CudaError."""
    plan = folder / manifest.files[0].name
    return TensorRTSession(importlib.import_module("tensorrt"), Cuda(), manifest, plan.read_bytes, slots=slots)


class EngineRefused(RuntimeError):
    """TensorRT rejects the engine, or would not run it in the way that we need."""


class TensorRTSession:
    """An EngineSession. `trt` is the tensorrt module; `read_plan` reads the serialized engine."""

    def __init__(
        self, trt: Any, cuda: Cuda, manifest: EngineManifest, read_plan: Callable[[], bytes], *, slots: int
    ) -> None:
        self.manifest = manifest
        self.parallel = slots
        self._trt = trt
        self._cuda = cuda
        self._read_plan = read_plan
        self._parked_plan: bytes | None = None  # the plan, while it is parked
        self._log = _logger(trt)
        trt.init_libnvinfer_plugins(self._log, "")
        self._runtime = trt.Runtime(self._log)  # must outlive its engine
        self._engine: Any = None
        self._slots: list[_Slot] = []
        self._free: list[_Slot] = []
        self._changed = threading.Condition()
        self._open(read_plan())

    def run(self, inputs: Arrays) -> Arrays:
        shapes = self._shapes(inputs)
        with self._slot(shapes) as slot:
            return slot.run(inputs, shapes)

    def warm_up(self, inputs: Arrays) -> None:
        shapes = self._shapes(inputs)
        for slot in self._slots:
            for _ in range(2):  # the first run enqueues, the second captures
                slot.run(inputs, shapes)

    @property
    def parked_bytes(self) -> int:
        return self.manifest.files[0].size

    def park(self) -> None:
        self._parked_plan = self._read_plan()
        self.close()

    def resume(self) -> None:
        parked_plan, self._parked_plan = self._parked_plan, None
        self._open(parked_plan or self._read_plan())

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        self._free.clear()
        self._engine = None

    def _open(self, plan: bytes) -> None:
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise EngineRefused(f"TensorRT cannot load the engine: {self._log.take_errors()}")
        _check_tensors(self._trt, self._engine, self.manifest)
        try:
            for _ in range(self.parallel):
                self._slots.append(_Slot(self._trt, self._cuda, self._engine, self.manifest, self._log))
        except BaseException:
            self.close()
            raise
        self._free.extend(self._slots)

    def _shapes(self, inputs: Arrays) -> _Shapes:
        return tuple(inputs[spec.name].shape for spec in self.manifest.inputs)

    @contextlib.contextmanager
    def _slot(self, shapes: _Shapes) -> Iterator[_Slot]:
        """Take a free slot: one with these shapes, else the least recently used."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free))
            slot = next((slot for slot in self._free if slot.shapes == shapes), self._free[0])
            self._free.remove(slot)
        try:
            yield slot
        finally:
            with self._changed:
                self._free.append(slot)
                self._changed.notify()


class _Buffer:
    """Memory of one tensor: a device buffer and a pinned host buffer."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        self._cuda = cuda
        self.size = size
        self.device = cuda.allocate(size)
        try:
            self.pinned = cuda.allocate_pinned(size)
        except BaseException:
            cuda.free(self.device)
            raise
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.pinned))

    def view(self, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """View the pinned memory as an array."""
        dtype = dtype_of(spec.datatype)
        view: Array = self._bytes[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        return view

    def free(self) -> None:
        self._cuda.free(self.device)
        self._cuda.free_pinned(self.pinned)


class _Slot:
    def __init__(self, trt: Any, cuda: Cuda, engine: Any, manifest: EngineManifest, log: Any) -> None:
        self.shapes: _Shapes | None = None
        self._cuda = cuda
        self._engine = engine
        self._manifest = manifest
        self._log = log
        self._outputs: dict[str, tuple[int, ...]] = {}
        self._runs = 0  # with the current shapes
        self._graph: int | None = None
        self._can_capture = True
        self._buffers: dict[str, _Buffer] = {}
        self._trt = trt
        self._allocators: dict[str, Any] = {}  # of outputs whose shape depends on the data
        self._stream = cuda.stream()
        try:
            self._context = engine.create_execution_context()
            if self._context is None:
                raise EngineRefused(f"TensorRT cannot create a context: {log.take_errors()}")
            self._profile: int = self._context.active_optimization_profile  # 0 for the first context, -1 for others
            self._allocate()
        except BaseException:
            self.close()
            raise

    def run(self, inputs: Arrays, shapes: _Shapes) -> Arrays:
        if shapes != self.shapes:
            self._reshape(shapes)
        for spec in self._manifest.inputs:
            array = inputs[spec.name]
            np.copyto(self._buffers[spec.name].view(spec, array.shape), array)
        if self._graph is None and self._runs == 1 and self._can_capture:
            self._capture()
        if self._graph is None:
            self._enqueue()
        else:
            self._cuda.launch(self._graph, self._stream)
        self._cuda.synchronize(self._stream)
        self._runs += 1
        return {
            spec.name: self._buffers[spec.name].view(spec, self._outputs[spec.name]).copy()
            for spec in self._manifest.outputs
        }

    def close(self) -> None:
        self._drop_graph()
        self._context = self._engine = None  # this frees their device memory
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()
        self._allocators.clear()
        self._cuda.destroy_stream(self._stream)

    def _allocate(self) -> None:
        """Allocate buffers for the largest shapes of any profile."""
        sizes = dict.fromkeys((spec.name for spec in (*self._manifest.inputs, *self._manifest.outputs)), 0)
        for profile in range(self._engine.num_optimization_profiles):
            self._reshape(self._largest(profile), profile)
            for spec, shape in zip(self._manifest.inputs, self.shapes or (), strict=True):
                sizes[spec.name] = max(sizes[spec.name], _bytes(spec, shape))
            for spec in self._fixed_outputs():
                sizes[spec.name] = max(sizes[spec.name], self._output_bytes(spec))
        for name, size in sizes.items():
            if name not in self._allocators:
                self._allocate_buffer(name, size)

    def _fixed_outputs(self) -> list[TensorSpec]:
        """Return the outputs whose shapes follow from the shapes of the inputs."""
        return [spec for spec in self._manifest.outputs if spec.name not in self._allocators]

    def _add_allocator(self, name: str) -> None:
        allocator = self._allocators[name] = _allocator_class(self._trt)(self._cuda, self._buffers)
        if not self._context.set_output_allocator(name, allocator):
            raise EngineRefused(f"TensorRT rejects an allocator for {name}: {self._log.take_errors()}")
        self._can_capture = False

    def _allocate_buffer(self, name: str, size: int) -> None:
        """Replace the buffer of a tensor. Without memory for a new one, TensorRT keeps the address of the old one."""
        buffer = _Buffer(self._cuda, max(size, 1))
        if not self._context.set_tensor_address(name, buffer.device):
            buffer.free()
            raise EngineRefused(f"TensorRT rejects the address of {name}: {self._log.take_errors()}")
        smaller = self._buffers.get(name)
        self._buffers[name] = buffer
        if smaller is not None:
            smaller.free()

    def _output_bytes(self, spec: TensorSpec) -> int:
        """Return the bytes that a run with the current shapes may write to an output."""
        upper_bound: int = self._context.get_max_output_size(spec.name)  # -1 if TensorRT knows none
        return max(upper_bound, _bytes(spec, self._outputs[spec.name]))

    def _largest(self, profile: int) -> _Shapes:
        return tuple(
            tuple(self._engine.get_tensor_profile_shape(spec.name, profile)[2]) for spec in self._manifest.inputs
        )

    def _reshape(self, shapes: _Shapes, profile: int | None = None) -> None:
        self.shapes = None  # until everything has succeeded
        self._drop_graph()
        self._runs = 0
        chosen = self._choose(shapes) if profile is None else profile
        if chosen != self._profile:
            try:
                is_selected = self._context.set_optimization_profile_async(chosen, self._stream)
            except RuntimeError:  # as the bindings of versions 10 and 11 report it
                is_selected = False
            if not is_selected:
                raise EngineRefused(f"cannot select profile {chosen}: {self._log.take_errors()}")
            self._cuda.synchronize(self._stream)
            self._profile = chosen
        for spec, shape in zip(self._manifest.inputs, shapes, strict=True):
            if not self._context.set_input_shape(spec.name, shape):
                raise EngineRefused(f"{spec.name} cannot have shape {list(shape)}: {self._log.take_errors()}")
        self._outputs = {spec.name: tuple(self._context.get_tensor_shape(spec.name)) for spec in self._manifest.outputs}
        for name, shape in self._outputs.items():
            if any(size < 0 for size in shape) and name not in self._allocators:
                self._add_allocator(name)
        for spec in self._fixed_outputs():
            if spec.name in self._buffers and (size := self._output_bytes(spec)) > self._buffers[spec.name].size:
                self._allocate_buffer(spec.name, size)
        self.shapes = shapes

    def _choose(self, shapes: _Shapes) -> int:
        """Return a profile that accepts `shapes`, the current one if possible."""
        profiles = self._engine.num_optimization_profiles
        for profile in sorted(range(profiles), key=lambda profile: profile != self._profile):
            ranges = [self._engine.get_tensor_profile_shape(spec.name, profile) for spec in self._manifest.inputs]
            if all(_within(shape, low, high) for shape, (low, _, high) in zip(shapes, ranges, strict=True)):
                return profile
        raise EngineRefused(f"no profile of the engine accepts {[list(shape) for shape in shapes]}")

    def _enqueue(self) -> None:
        cuda, stream = self._cuda, self._stream
        for spec, shape in zip(self._manifest.inputs, self.shapes or (), strict=True):
            buffer = self._buffers[spec.name]
            cuda.copy(buffer.device, buffer.pinned, _bytes(spec, shape), stream)
        for allocator in self._allocators.values():
            allocator.begin()
        has_run = self._context.execute_async_v3(stream)
        for name, allocator in self._allocators.items():
            self._outputs[name] = allocator.end()
        if not has_run or None in self._outputs.values():
            raise EngineRefused(f"TensorRT cannot run the engine: {self._log.take_errors()}")
        for spec in self._manifest.outputs:
            buffer = self._buffers[spec.name]
            cuda.copy(buffer.pinned, buffer.device, _bytes(spec, self._outputs[spec.name]), stream)

    def _capture(self) -> None:
        """Capture a graph. Engines that synchronize in the middle cannot be captured; they run without a graph."""
        try:
            with self._cuda.capture(self._stream) as graphs:
                self._enqueue()
        except (CudaError, EngineRefused):
            self._can_capture = False
        else:
            self._graph = graphs[0]

    def _drop_graph(self) -> None:
        if self._graph is not None:
            self._cuda.destroy_graph(self._graph)
            self._graph = None


@functools.cache
def _allocator_class(trt: Any) -> Any:
    """Return the class of allocators. Its base class is in the bindings, which are imported late."""

    class OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]
        """Memory of one output, which grows as runs need it. TensorRT's callbacks must not raise."""

        def __init__(self, cuda: Cuda, buffers: dict[str, _Buffer]) -> None:
            trt.IOutputAllocator.__init__(self)
            self._cuda = cuda
            self._buffers = buffers
            self._error: CudaError | None = None
            self._shape: tuple[int, ...] | None = None

        def begin(self) -> None:
            self._error = self._shape = None

        def end(self) -> tuple[int, ...] | None:
            """Return the shape in this run, or None if TensorRT reported none. Raises CudaError without memory."""
            if self._error is not None:
                raise self._error
            return self._shape

        def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
            """Return the address of at least `size` bytes, or 0. CUDA's own alignment is 256 bytes or more."""
            buffer = self._buffers.get(name)
            if buffer is None or buffer.size < size:
                try:
                    larger = _Buffer(self._cuda, max(size, 1))
                except CudaError as error:
                    self._error = error
                    return 0
                self._buffers[name] = larger
                if buffer is not None:
                    buffer.free()
                buffer = larger
            return buffer.device

        def notify_shape(self, name: str, shape: Sequence[int]) -> None:
            self._shape = tuple(shape)

    return OutputAllocator


def _check_tensors(trt: Any, engine: Any, manifest: EngineManifest) -> None:
    """Raise EngineRefused if the engine does not match the manifest, or needs unsupported features."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = {name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT}
    if inputs != _names(manifest.inputs) or set(names) - inputs != _names(manifest.outputs):
        raise EngineRefused(f"the engine has the tensors {', '.join(names)}, but its manifest names others")
    for name in names:
        if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
            raise EngineRefused(f"{name} is a shape tensor (its values determine shapes), which is not supported")


def _names(specs: Sequence[TensorSpec]) -> set[str]:
    return {spec.name for spec in specs}


def _within(shape: Sequence[int], low: Sequence[int], high: Sequence[int]) -> bool:
    return len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))


def _bytes(spec: TensorSpec, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype_of(spec.datatype).itemsize


@functools.cache
def _logger(trt: Any) -> Any:
    """Return the logger, which collects errors: TensorRT returns None or False, and the reason is only in its log. All
    sessions share it: TensorRT and its plugins keep raw pointers to it as long as the process lives."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self._lines = [*self._lines[1 - _MAX_LINES :], message]

        def take_errors(self) -> str:
            lines, self._lines = self._lines, []
            return "; ".join(lines) or "TensorRT gives no reason"

    return Log()
