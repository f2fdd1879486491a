"""Element types in ONNX, in the Open Inference Protocol and in numpy."""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import TensorProto

from gpufn_core.spec.model_spec import TensorSpec

Array = npt.NDArray[Any]
Arrays = dict[str, Array]  # by the name of the input or output; an array of BYTES holds str objects

BF16: Final = np.dtype(ml_dtypes.bfloat16)
MAX_ELEMENTS: Final = 1 << 34  # per tensor

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8), "UINT16": np.dtype(np.uint16), "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8), "INT16": np.dtype(np.int16), "INT32": np.dtype(np.int32), "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16), "FP32": np.dtype(np.float32), "FP64": np.dtype(np.float64), "BF16": BF16,
    "BYTES": np.dtype(np.object_),
}  # fmt: skip

# ONNX element types → datatypes of the protocol. Types that the protocol does not support are missing.
_DATATYPES: Final[dict[int, str]] = {
    TensorProto.BOOL: "BOOL",
    TensorProto.UINT8: "UINT8", TensorProto.UINT16: "UINT16", TensorProto.UINT32: "UINT32",
    TensorProto.UINT64: "UINT64",
    TensorProto.INT8: "INT8", TensorProto.INT16: "INT16", TensorProto.INT32: "INT32", TensorProto.INT64: "INT64",
    TensorProto.FLOAT16: "FP16", TensorProto.FLOAT: "FP32", TensorProto.DOUBLE: "FP64", TensorProto.BFLOAT16: "BF16",
    TensorProto.STRING: "BYTES",
}  # fmt: skip


def datatype_of(element_type: int) -> str | None:
    """Return the protocol's name of an ONNX element type; None if it has none.

    >>> datatype_of(TensorProto.FLOAT), datatype_of(TensorProto.FLOAT8E4M3FN)
    ('FP32', None)
    """
    return _DATATYPES.get(element_type)


def dtype_of(datatype: str) -> np.dtype[Any]:
    return _DTYPES[datatype]


def default_of(spec: TensorSpec) -> Array:
    """Return the default value of an input that has one."""
    assert spec.default is not None
    return np.frombuffer(spec.default, dtype_of(spec.datatype)).reshape(spec.shape)


def is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype == BF16


def describe_tensor(spec: TensorSpec) -> str:
    """
    >>> describe_tensor(TensorSpec("images", "FP32", (-1, 3, 224, 224)))
    'images FP32[-1,3,224,224]'
    """
    return f"{spec.name} {spec.datatype}[{','.join(map(str, spec.shape))}]"
