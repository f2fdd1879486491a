"""TensorRT, through its Python API: the engine is a plan for exactly this release and this GPU model.

Written for 11.x and compatible with 10.x. Networks are strongly typed, so the graph determines the precision, and TF32
is the only remaining choice. Errors that the API reports only by return values and its log become BuildFailed.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorrt as trt

from gpufn_builder.compilers.base import Compiled, CompileJob, ReportProgress
from gpufn_builder.onnx_model.tensors import Arrays, dtype_of
from gpufn_core.errors import BuildFailed
from gpufn_core.inference.cudart import Cuda, CudaError
from gpufn_core.spec.model_spec import ShapeProfile

_ENGINE: Final = "engine.plan"
_MAX_ERRORS: Final = 20
_NODE: Final = re.compile(r"[Nn]ode (?:\w+ )?\[?name:? ?\"?([^\s\"\]]+)")


class TensorRT:
    def compile(self, job: CompileJob, report_progress: ReportProgress) -> Compiled:
        log = _open_log()
        builder = trt.Builder(log)
        # The flag is required before 11, and ignored since.
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, log)
        report_progress(0.0, "parsing the graph")
        if not parser.parse_from_file(str(job.model)):
            raise _parse_failed(parser, log)
        config = builder.create_builder_config()
        config.builder_optimization_level = int(job.flags["builder_optimization_level"])
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if job.flags["tf32"] == "1":
            config.set_flag(trt.BuilderFlag.TF32)
        else:
            config.clear_flag(trt.BuilderFlag.TF32)  # enabled by default
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, int(job.flags["workspace_bytes"]))
        for profile in job.profiles:
            _add_profile(builder, config, profile, log)
        monitor = _Monitor(report_progress)
        config.progress_monitor = monitor
        cache = _timing_file(job)
        if not config.set_timing_cache(_timings(config, cache), ignore_mismatch=False):  # made on another device
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise log.failed("TensorRT could not build an engine")
        (job.folder / _ENGINE).write_bytes(plan)
        _save_timings(config.get_timing_cache(), cache)
        return _describe_plan(log, job.folder / _ENGINE)

    def load(self, job: CompileJob, compiled: Compiled) -> TrtEngine:
        return TrtEngine(job.folder / compiled.files[0], job)


class TrtEngine:
    """One execution context and one stream. Host memory is not pinned, so the measured latency is an upper bound."""

    def __init__(self, plan: Path, job: CompileJob) -> None:
        self._log = _open_log()
        self._runtime = trt.Runtime(self._log)
        self._engine = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        if self._engine is None:
            raise self._log.failed("TensorRT cannot load the engine that it built", stage="verify")
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise self._log.failed(
                "TensorRT cannot create a context: the GPU may have too little memory", stage="verify"
            )
        self._cuda = Cuda()
        self._stream = self._cuda.stream()
        self._profiles = job.profiles
        self._dtypes = {spec.name: dtype_of(spec.datatype) for spec in (*job.inputs, *job.outputs)}
        self._outputs = [spec.name for spec in job.outputs]
        self._allocations: list[int] = []
        self._allocator = _OutputAllocator(self._cuda)

    def run(self, inputs: Arrays) -> Arrays:
        arrays = _contiguous(inputs)
        return self._execute(arrays, self._prepare(arrays))

    def bind(self, inputs: Arrays) -> Callable[[], object]:
        arrays = _contiguous(inputs)
        outputs = self._prepare(arrays)
        return lambda: self._execute(arrays, outputs)

    def close(self) -> None:
        self._release()
        self._allocator.free()
        self._cuda.destroy_stream(self._stream)

    def _prepare(self, inputs: Arrays) -> Arrays:
        """Set the shapes and addresses for a set of inputs, and allocate the outputs, except those whose shape depends
        on the data. Frees the device memory of the previous set."""
        self._release()
        self._addresses: dict[str, int] = {}
        profile = self._profile_for(inputs)
        try:
            is_selected = self._context.set_optimization_profile_async(profile, self._stream)
        except RuntimeError:  # as the bindings of versions 10 and 11 report it
            is_selected = False
        if not is_selected:
            raise self._log.failed(f"TensorRT cannot select profile {profile}", stage="verify")
        for name, array in inputs.items():
            if not self._context.set_input_shape(name, array.shape):
                raise self._log.failed(f"TensorRT rejects {name} with the shape {list(array.shape)}", stage="verify")
            self._allocate(name, array.nbytes)
        if missing := self._context.infer_shapes():
            raise self._log.failed(f"TensorRT lacks shapes for {', '.join(missing)}", stage="verify")
        outputs: Arrays = {}
        for name in self._outputs:
            shape = tuple(self._context.get_tensor_shape(name))
            if -1 in shape:
                if not self._context.set_output_allocator(name, self._allocator):
                    raise self._log.failed(f"TensorRT rejects an allocator for {name}", stage="verify", node=name)
                continue
            output = np.empty(shape, self._dtypes[name])
            upper_bound = self._context.get_max_output_size(name)  # -1 if TensorRT knows none
            self._allocate(name, max(upper_bound, output.nbytes))
            outputs[name] = output
        return outputs

    def _profile_for(self, inputs: Arrays) -> int:
        for index, profile in enumerate(self._profiles):
            if all(ranged.accepts(inputs[name].shape) for name, ranged in profile.inputs.items()):
                return index
        return 0

    def _execute(self, inputs: Arrays, allocated: Arrays) -> Arrays:
        for name, array in inputs.items():
            self._cuda.copy(self._addresses[name], array.ctypes.data, array.nbytes, self._stream)
        self._allocator.shapes.clear()
        if not self._context.execute_async_v3(self._stream):
            raise self._log.failed("TensorRT could not run the engine", stage="verify")
        shapes = self._allocator.shapes  # known once the call returns
        addresses = self._addresses | self._allocator.addresses
        outputs = allocated | {name: np.empty(shape, self._dtypes[name]) for name, shape in shapes.items()}
        if missing := [name for name in self._outputs if name not in outputs]:
            raise self._log.failed(f"TensorRT reported no shape for {', '.join(missing)}", stage="verify")
        for name, output in outputs.items():
            self._cuda.copy(output.ctypes.data, addresses[name], output.nbytes, self._stream)
        self._cuda.synchronize(self._stream)
        return outputs

    def _allocate(self, name: str, size: int) -> None:
        address = self._addresses[name] = self._cuda.allocate(size)
        self._allocations.append(address)
        if not self._context.set_tensor_address(name, address):
            raise self._log.failed(f"TensorRT rejects the address of {name}", stage="verify", node=name)

    def _release(self) -> None:
        while self._allocations:
            self._cuda.free(self._allocations.pop())


class _OutputAllocator(trt.IOutputAllocator):  # type: ignore[misc]  # the bindings have no types
    """Memory of outputs whose shape depends on the data, which TensorRT requests during a run. Must not raise there."""

    def __init__(self, cuda: Cuda) -> None:
        trt.IOutputAllocator.__init__(self)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._cuda = cuda

    def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
        """Return the address of at least `size` bytes, or 0. CUDA's own alignment is 256 bytes or more."""
        if self._sizes.get(name, -1) < size:
            try:
                larger = self._cuda.allocate(max(size, 1))
            except CudaError:
                return 0
            smaller = self.addresses.get(name)
            self.addresses[name], self._sizes[name] = larger, size
            if smaller is not None:
                self._cuda.free(smaller)
        return self.addresses[name]

    def notify_shape(self, name: str, shape: Sequence[int]) -> None:
        self.shapes[name] = tuple(shape)

    def free(self) -> None:
        while self.addresses:
            self._cuda.free(self.addresses.popitem()[1])
        self._sizes.clear()


class _Log(trt.ILogger):  # type: ignore[misc]
    """Collects TensorRT's errors, which are often the only explanation of a failed call."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self._errors: list[str] = []
        self._lock = threading.Lock()

    def clear(self) -> None:
        with self._lock:
            self._errors = []

    def log(self, severity: Any, message: str) -> None:
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            with self._lock:
                self._errors = [*self._errors, message][-_MAX_ERRORS:]

    def failed(self, what: str, *, stage: str = "compile", node: str = "") -> BuildFailed:
        errors = "; ".join(" ".join(error.split()) for error in self._errors[:2])
        match = _NODE.search(errors)
        return BuildFailed(
            f"{what}: {errors[:500]}" if errors else what,
            stage=stage,
            node=node or (match[1] if match else ""),
            log="\n".join(self._errors),
        )


_LOG: Final = _Log()


def _open_log() -> _Log:
    """Return the log, emptied. It lives as long as the process, because TensorRT keeps a raw pointer to the first
    logger that it receives, and its plugin library to the last."""
    _LOG.clear()
    trt.init_libnvinfer_plugins(_LOG, "")
    return _LOG


class _Monitor(trt.IProgressMonitor):  # type: ignore[misc]
    """Called from TensorRT's threads; never raises there. Reports the progress of the outermost phase."""

    def __init__(self, report_progress: ReportProgress) -> None:
        trt.IProgressMonitor.__init__(self)
        self._report_progress = report_progress
        self._lock = threading.Lock()
        self._steps: dict[str, int] = {}
        self._outermost = ""

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        with self._lock:
            self._steps[phase_name] = max(1, num_steps)
            self._outermost = self._outermost or phase_name

    def step_complete(self, phase_name: str, step: int) -> bool:
        with contextlib.suppress(Exception), self._lock:
            if phase_name == self._outermost:
                self._report_progress(min(1.0, (step + 1) / self._steps[phase_name]), phase_name)
        return True

    def phase_finish(self, phase_name: str) -> None:
        with self._lock:
            self._steps.pop(phase_name, None)


def _parse_failed(parser: Any, log: _Log) -> BuildFailed:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    if not errors:
        return log.failed("TensorRT could not read the model")
    first = errors[0]
    operator = f" ({first.node_operator()})" if first.node_operator() else ""
    return BuildFailed(
        f"TensorRT rejects this model: {first.code().name}{operator}: {first.desc()}",
        stage="compile",
        node=first.node_name(),
        log="\n".join(f"{error.code().name} {error.node_name()}: {error.desc()}" for error in errors[:_MAX_ERRORS]),
    )


def _add_profile(builder: Any, config: Any, profile: ShapeProfile, log: _Log) -> None:
    if not profile.inputs:
        return
    shapes = builder.create_optimization_profile()
    for name, ranged in profile.inputs.items():
        shapes.set_shape(name, ranged.min, ranged.opt, ranged.max)
    if config.add_optimization_profile(shapes) < 0:
        raise log.failed(f"TensorRT rejects the profile {'; '.join(f'{n}: {r}' for n, r in profile.inputs.items())}")


def _contiguous(inputs: Arrays) -> Arrays:
    return {name: np.require(array, requirements=["C", "A"]) for name, array in inputs.items()}


def _describe_plan(log: _Log, plan: Path) -> Compiled:
    """Load the plan once and count its layers."""
    engine = trt.Runtime(log).deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        raise log.failed("TensorRT cannot load the engine that it built")
    counted: Counter[str] = Counter()
    information = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        counted.update(f"{layer.get('LayerType', 'layer')} on TensorRT" for layer in json.loads(information)["Layers"])
    settings: dict[str, int | str] = {"device_memory_bytes": engine.device_memory_size_v2}
    return Compiled(files=(_ENGINE,), settings=settings, gpu_nodes=engine.num_layers, nodes=dict(counted))


def _timing_file(job: CompileJob) -> Path:
    """Return the timing cache for this release and GPU model: TensorRT rejects the timings of another model."""
    return job.caches / f"tensorrt-{trt.__version__}-{re.sub(r'[^a-z0-9.]+', '-', job.device.lower())}.timing"


def _timings(config: Any, path: Path) -> Any:
    """Load the timing cache of earlier builds; empty if there is none or it cannot be read. It only saves time."""
    data = b""
    with contextlib.suppress(OSError):
        data = path.read_bytes()
    cache = config.create_timing_cache(data)
    return config.create_timing_cache(b"") if cache is None else cache


def _save_timings(timing_cache: Any, path: Path) -> None:
    """Save the timing cache for the next build, which then tunes faster and makes the same choices. A failure does not
    affect the engine."""
    if timing_cache is not None:
        part = path.with_suffix(f".{secrets.token_hex(8)}")  # builds have the same pids, each in its own namespace
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(timing_cache.serialize())
            part.replace(path)
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
