"""A model on ONNX Runtime's CPU provider as it is written: nothing optimised, one thread, the same result each time."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
from onnx import TensorProto

from gpufn.engine import BuildStage
from gpufn.errors import BuildFailed
from gpufn.model import TensorSpec
from gpufn_builder.tensors import BF16, Array, Arrays

_SILENT: Final = 4  # what matters is raised
_NODE: Final = re.compile(
    r"(?:Name:'(?P<run>[^']+)'|Error Node \((?P<load>[^)]+)\)|node with name '(?P<kernel>[^']+)')"
)
_STATUS: Final = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_WHERE: Final = re.compile(r"\S*/onnxruntime_src/\S+:\d+ .*?\) ")  # source file, line and signature


class CpuSession:
    def __init__(self, path: Path, outputs: Sequence[TensorSpec], stage: BuildStage) -> None:
        """The model at `path`; its external data lie beside it. Raises BuildFailed(stage=stage) with the node."""
        self._stage = stage
        self._outputs = outputs
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.use_deterministic_compute = True
        options.log_severity_level = _SILENT
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise self._failed("ONNX Runtime does not take the model", error) from error

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Every output. Raises BuildFailed that names the node."""
        run = self._run_values if self._has_bf16(inputs) else self._run_arrays
        try:
            return dict(zip((output.name for output in self._outputs), run(inputs), strict=True))
        except Exception as error:
            raise self._failed("the model does not run", error) from error

    def _has_bf16(self, inputs: Mapping[str, Array]) -> bool:
        return any(array.dtype == BF16 for array in inputs.values()) or any(
            output.datatype == "BF16" for output in self._outputs
        )

    def _run_arrays(self, inputs: Mapping[str, Array]) -> list[Array]:
        found: list[Array] = self._session.run([output.name for output in self._outputs], dict(inputs))
        return [np.asarray(array) for array in found]

    def _run_values(self, inputs: Mapping[str, Array]) -> list[Array]:
        """For BF16, of which `run` knows nothing; of these values there are none with texts."""
        fed = {name: _value(array) for name, array in inputs.items()}
        return [_array(value) for value in self._session.run_with_ort_values([o.name for o in self._outputs], fed)]

    def _failed(self, what: str, error: Exception) -> BuildFailed:
        text = str(error)
        node = _NODE.search(text)
        reason = " ".join(_WHERE.sub("", _STATUS.sub("", text)).split())
        return BuildFailed(f"{what}: {reason}", stage=self._stage, node=node[node.lastgroup or 0] if node else "")


def _value(array: Array) -> Any:
    array = np.array(array, order="C")
    if array.dtype == BF16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _array(value: Any) -> Array:
    if value.element_type() != TensorProto.BFLOAT16:
        array: Array = value.numpy()
        return array
    shape = tuple(value.shape())
    bits = ctypes.string_at(value.data_ptr(), 2 * math.prod(shape))
    return np.frombuffer(bits, BF16).reshape(shape)
