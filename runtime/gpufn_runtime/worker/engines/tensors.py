"""Open Inference Protocol datatypes as numpy dtypes, and conversion of callers' values to arrays."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from gpufn_core.encoding.values import number_word
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.model_spec import DATATYPES, TensorSpec
from gpufn_runtime.worker.engines.base import Array

if importlib.util.find_spec("ml_dtypes") is not None:
    import ml_dtypes

    BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
else:
    BF16 = np.dtype(np.uint16)  # the bits

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": BF16,
    "BYTES": np.dtype(np.object_),  # of str: an ONNX string is UTF-8
    **{name: np.dtype(name.lower()) for name in DATATYPES if name.startswith(("INT", "UINT"))},
}
_DATATYPES = {dtype: name for name, dtype in _DTYPES.items() if name not in ("BF16", "BYTES")} | (
    {} if BF16.kind == "u" else {BF16: "BF16"}
)
# Kinds of numpy arrays that a list of Python values may convert from, by the kind of the target dtype.
_NUMBER_WORDS = {number_word(number): number for number in (np.nan, np.inf, -np.inf)}
_FROM_KINDS = {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}


def dtype_of(datatype: str) -> np.dtype[Any]:
    return _DTYPES[datatype]


def datatype_of(dtype: np.dtype[Any]) -> str | None:
    """Return the datatype of an array; None if the protocol has none. Arrays of text are BYTES.

    >>> datatype_of(np.dtype("float32")), datatype_of(np.dtype("<U3")), datatype_of(np.dtype("complex64"))
    ('FP32', 'BYTES', None)
    """
    if dtype.kind in "US":
        return "BYTES"
    return _DATATYPES.get(dtype)


def described(spec: TensorSpec) -> str:
    """Describe a tensor in one line.
    >>> described(TensorSpec("images", "FP32", (-1, 3, 224, 224)))
    'images FP32[-1,3,224,224]'
    """
    optional = "" if spec.default is None else " (optional)"
    return f"{spec.name} {spec.datatype}[{','.join(map(str, spec.shape))}]{optional}"


def default_of(spec: TensorSpec) -> Array | None:
    """Return the value of an input that the caller left out, or None if the caller has to send it."""
    return None if spec.default is None else np.frombuffer(spec.default, dtype_of(spec.datatype)).reshape(spec.shape)


def as_array(spec: TensorSpec, value: Any) -> Array:
    """Convert `value` for the tensor `spec`. Arrays must have its dtype and are not copied; lists and numbers are
    converted
    if only precision is lost. Raises InvalidInput, which names the tensor. Shapes are not checked.

    >>> as_array(TensorSpec("x", "FP32", (2,)), [1, 2]).dtype
    dtype('float32')
    """
    if isinstance(value, (list, tuple, bool, int, float, str, bytes)):
        return _converted(spec, value)
    array = np.asarray(value)
    dtype = dtype_of(spec.datatype)
    if array.dtype == dtype and dtype != np.object_:
        return array
    if spec.datatype == "BYTES":
        return texts(spec, array)
    if spec.datatype == "BF16" and array.dtype == np.uint16:
        return array.view(BF16)
    raise InvalidInput(
        f"{spec.name}: the model takes {dtype}, but this array is {array.dtype}: use .astype(...)", field=spec.name
    )


def cast(spec: TensorSpec, value: Any) -> Array:
    """Like `as_array`, but also cast arrays of another dtype if only precision is lost: clients do not know this
    model's dtypes."""
    if isinstance(value, (np.ndarray, np.generic)):
        array, dtype = np.asarray(value), dtype_of(spec.datatype)
        if array.dtype != dtype and dtype.kind in _FROM_KINDS and np.can_cast(array.dtype, dtype, "same_kind"):
            return array.astype(dtype)
        return as_array(spec, array)
    return as_array(spec, value)


def texts(spec: TensorSpec, array: Array) -> Array:
    """Convert the elements of a BYTES tensor to str. Raises InvalidInput for elements that are not text."""
    result = np.empty(array.shape, np.object_)
    flat = result.reshape(-1)
    for index, element in enumerate(array.reshape(-1).tolist()):
        flat[index] = element if isinstance(element, str) else _text(spec, index, element)
    return result


def _text(spec: TensorSpec, index: int, element: Any) -> str:
    if not isinstance(element, bytes):
        kind = type(element).__name__
        raise InvalidInput(f"{spec.name}: element {index} of a BYTES tensor must be text, not {kind}", field=spec.name)
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{spec.name}: element {index} is not UTF-8: {error.reason}", field=spec.name) from None


def _converted(spec: TensorSpec, value: Any) -> Array:
    dtype = dtype_of(spec.datatype)
    if spec.datatype == "BYTES":
        return texts(spec, _object_array(spec, value))
    if spec.datatype == "BF16" and dtype == np.uint16:
        raise InvalidInput(
            f"{spec.name}: BF16 must be sent as bytes, or as an array of uint16 with its bits", field=spec.name
        )
    try:
        natural = np.asarray(value)
        if natural.dtype.kind == "U" and dtype.kind == "f":
            natural = _with_number_words(value)
        if natural.dtype == np.float64 and dtype == np.uint64:
            integers = np.asarray(value, np.object_)  # numpy makes float64 of integers on both sides of 2**63
            if all(type(element) is int for element in integers.reshape(-1).tolist()):
                return integers.astype(dtype)
        empty = natural.size == 0
        if not empty and natural.dtype.kind not in _FROM_KINDS.get(dtype.kind, "biuf"):
            raise TypeError(f"{natural.dtype} values")
        with np.errstate(over="ignore"):  # 1e40 becomes infinity in float32
            return natural.astype(dtype) if dtype.kind not in "iu" or empty else np.asarray(value, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{spec.name}: cannot be converted to {spec.datatype}: {error}", field=spec.name) from None


def _with_number_words(value: Any) -> Array:
    """Convert numbers, including "NaN", "Infinity" and "-Infinity", because JSON lacks these numbers."""
    items = np.asarray(value, np.object_)
    flat = [_NUMBER_WORDS.get(item, item) if isinstance(item, str) else item for item in items.reshape(-1).tolist()]
    if text := next((item for item in flat if not isinstance(item, (int, float))), None):
        raise TypeError(f"{text!r} is not a number")
    return np.array(flat, np.float64).reshape(items.shape)


def _object_array(spec: TensorSpec, value: Any) -> Array:
    """Convert nested lists of texts. numpy alone would use fixed-size strings and drop trailing zeros."""
    try:
        return np.array(value, np.object_)
    except ValueError as error:
        raise InvalidInput(f"{spec.name}: {error}", field=spec.name) from None
