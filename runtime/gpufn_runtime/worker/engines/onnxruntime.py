"""Engines that run on ONNX Runtime: on the CPU, or with its CUDA provider."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from gpufn_core.domain.devices.engine import Backend, EngineManifest
from gpufn_core.inference.ort_integers import EXACT
from gpufn_core.inference.ort_threads import spin_config
from gpufn_core.spec.model_spec import Precision, TensorSpec
from gpufn_runtime.worker.engines.base import Array, Arrays, contiguous
from gpufn_runtime.worker.engines.input_errors import blames_inputs, refused_inputs
from gpufn_runtime.worker.engines.tensors import BF16, dtype_of

_ONNX_BF16 = 16  # TensorProto.BFLOAT16, for which ONNX Runtime has no numpy type
_ERRORS_ONLY = 3
_LEVELS = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


class OrtSession:
    """An EngineSession. On the CPU it makes one run at a time, with all threads; on a GPU one run per slot.

    The constructor raises exceptions of ONNX Runtime, and RuntimeError if it chose another provider.
    """

    def __init__(self, manifest: EngineManifest, folder: Path, *, slots: int, cores: float) -> None:
        self.manifest = manifest
        self.parallel = slots if manifest.backend.on_gpu else 1
        self._folder = folder
        self._cores = cores
        self._parked_engine: bytes | None = None  # the engine, while it is parked
        if manifest.backend.on_gpu:
            onnxruntime.preload_dlls()  # CUDA libraries from wheels, which the dynamic loader does not find
        self._session = self._open(folder / manifest.files[0].name)
        self._outputs = [spec.name for spec in manifest.outputs]
        has_bf16 = any(spec.datatype == "BF16" for spec in (*manifest.inputs, *manifest.outputs))
        # `run` is 4 us faster on the CPU but does not support BF16.
        self._is_bound = has_bf16 or manifest.backend.on_gpu

    def run(self, inputs: Arrays) -> Arrays:
        try:
            return self._run(inputs)
        except InvalidArgument as error:
            raise refused_inputs(inputs, error) from error
        except Fail as error:
            if not blames_inputs(error):
                raise
            raise refused_inputs(inputs, error) from error

    def _run(self, inputs: Arrays) -> Arrays:
        if self._is_bound:
            return self._run_bound(inputs)
        contiguous_inputs = {name: contiguous(array) for name, array in inputs.items()}
        return dict(zip(self._outputs, self._session.run(self._outputs, contiguous_inputs), strict=True))

    def warm_up(self, inputs: Arrays) -> None:
        self.run(inputs)

    @property
    def parked_bytes(self) -> int:
        return 0 if self._has_external_data else self.manifest.files[0].size

    def park(self) -> None:
        if not self._has_external_data:
            self._parked_engine = (self._folder / self.manifest.files[0].name).read_bytes()
        self._session = None

    def resume(self) -> None:
        parked_engine, self._parked_engine = self._parked_engine, None
        self._session = self._open(parked_engine or self._folder / self.manifest.files[0].name)

    def close(self) -> None:
        self._session = None

    @property
    def _has_external_data(self) -> bool:
        """Whether the model has external data, which ONNX Runtime reads from the model file's folder."""
        return len(self.manifest.files) > 2  # the engine and its golden sample

    def _open(self, engine: Path | bytes) -> Any:
        provider, options = _provider(self.manifest)
        session = onnxruntime.InferenceSession(
            engine, _session_options(self.manifest, self._cores), providers=[provider], provider_options=[options]
        )
        if (actual := session.get_providers()[0]) != provider:
            raise RuntimeError(f"ONNX Runtime chose {actual} instead of {provider}")
        return session

    def _run_bound(self, inputs: Arrays) -> Arrays:
        binding = self._session.io_binding()
        values = [
            _value(contiguous(inputs[spec.name]), spec) for spec in self.manifest.inputs
        ]  # alive until the run ends
        for spec, value in zip(self.manifest.inputs, values, strict=True):
            binding.bind_ortvalue_input(spec.name, value)
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        return {
            spec.name: _array(value, spec)
            for spec, value in zip(self.manifest.outputs, binding.get_outputs(), strict=True)
        }


open_engine = OrtSession


def _provider(manifest: EngineManifest) -> tuple[str, dict[str, str]]:
    if manifest.backend is Backend.ORT_CPU:
        return "CPUExecutionProvider", {}
    return "CUDAExecutionProvider", {"use_tf32": str(int(manifest.identity.recipe is Precision.TF32))}


def _session_options(manifest: EngineManifest, cores: float) -> Any:
    settings = manifest.settings
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = int(settings.get("intra_op_threads", 0)) or max(1, math.ceil(cores))
    options.graph_optimization_level = _LEVELS[str(settings.get("graph_optimization", "all"))]
    for entry, value in {**spin_config(onnxruntime.__version__), **EXACT}.items():
        options.add_session_config_entry(entry, value)
    if manifest.backend.on_gpu and not manifest.cpu_nodes:
        # Otherwise nodes that the provider does not support, or all if it fails to load, would silently run on the CPU.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return options


def _value(array: Array, spec: TensorSpec) -> Any:
    if spec.datatype == "BF16":
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BF16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _array(value: Any, spec: TensorSpec) -> Array:
    if spec.datatype != "BF16":
        array: Array = value.numpy()
        return array if spec.datatype == "BYTES" else array.astype(dtype_of(spec.datatype), copy=False)
    shape = value.shape()
    if not math.prod(shape):
        return np.empty(shape, BF16)
    bits = (ctypes.c_uint16 * math.prod(shape)).from_address(value.data_ptr())
    return np.ctypeslib.as_array(bits).reshape(shape).copy().view(BF16)
