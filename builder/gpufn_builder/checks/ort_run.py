"""Execution of ONNX Runtime sessions with any tensor type, and conversion of its errors to ours."""

from __future__ import annotations

import ctypes
import math
import re
import resource
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnxruntime
from onnx import TensorProto

from gpufn_builder.onnx_model.tensors import BF16, Array, Arrays
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TensorSpec
from gpufn_core.spec.units import format_bytes

_NODE: Final = re.compile(r"(?:Name:|with name )'([^']+)'|[Nn]ode \(([^)]+)\)")
_NO_MEMORY: Final = "Failed to allocate memory"
# Nodes with subgraphs report the errors of nodes in them, inside their own.
_OUTER: Final = re.compile(r"^.* Status Message: (?=Non-zero status code returned while running )", re.DOTALL)
_STATUS: Final = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
# Parts of a message to remove: source file, line and signature; and the path of the model on this machine.
_WHERE: Final = re.compile(r"\S*/onnxruntime_src/\S+:\d+ .*?\) |Load model from \S+ (failed:)?")


def run(session: Any, outputs: Sequence[TensorSpec], inputs: Mapping[str, Array]) -> Arrays:
    """Return every output. Raises the exceptions of ONNX Runtime."""
    names = [output.name for output in outputs]
    has_bf16 = any(array.dtype == BF16 for array in inputs.values()) or any(each.datatype == "BF16" for each in outputs)
    if not has_bf16:
        return dict(zip(names, map(np.asarray, session.run(names, dict(inputs))), strict=True))
    # `run` does not support BF16, and `run_with_ort_values` does not support text.
    if any(array.dtype == np.object_ for array in inputs.values()):
        raise TypeError("ONNX Runtime takes texts and BF16 from Python, and not both in one model")
    values = session.run_with_ort_values(names, {name: _value(array) for name, array in inputs.items()})
    return dict(zip(names, map(_array, values), strict=True))


def failed(what: str, error: Exception, stage: BuildStage) -> BuildFailed:
    """Build the error for an exception of ONNX Runtime, with the node if it names one, and the limit on an allocation
    failure."""
    text = _OUTER.sub("", str(error))
    node = _NODE.search(text)
    reason = " ".join(_WHERE.sub("", _STATUS.sub("", text)).split())
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if _NO_MEMORY in text and limit_bytes != resource.RLIM_INFINITY:
        reason += f"; the limit is {format_bytes(limit_bytes)}"
    return BuildFailed(f"{what}: {reason}", stage=stage, node=node[node.lastindex or 0] if node else "")


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
