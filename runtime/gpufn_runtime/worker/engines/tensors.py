"""Open Inference Protocol datatypes as numpy dtypes, and what callers send as arrays of them."""

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
# Which kinds of numpy array a list of Python values may become, by the kind of the dtype that is wanted.
_NUMBER_WORDS = {number_word(number): number for number in (np.nan, np.inf, -np.inf)}
_FROM_KINDS = {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}


def dtype_of(datatype: str) -> np.dtype[Any]:
    return _DTYPES[datatype]


def described(spec: TensorSpec) -> str:
    """
    >>> described(TensorSpec("images", "FP32", (-1, 3, 224, 224)))
    'images FP32[-1,3,224,224]'
    """
    optional = "" if spec.default is None else " (optional)"
    return f"{spec.name} {spec.datatype}[{','.join(map(str, spec.shape))}]{optional}"


def default_of(spec: TensorSpec) -> Array | None:
    """Return the value of an input that the caller left out, or None if the caller has to send it."""
    return None if spec.default is None else np.frombuffer(spec.default, dtype_of(spec.datatype)).reshape(spec.shape)


def as_array(spec: TensorSpec, value: Any) -> Array:
    """`value` for the tensor `spec`: arrays as they are, and only of its dtype; lists and numbers converted where that
    loses nothing but precision. InvalidInput names the tensor. Shapes are not looked at.

    >>> as_array(TensorSpec("x", "FP32", (2,)), [1, 2]).dtype
    dtype('float32')
    """
    if isinstance(value, (list, tuple, bool, int, float, str, bytes)):
        return _converted(spec, value)
    array = np.asarray(value)
    wanted = dtype_of(spec.datatype)
    if array.dtype == wanted and wanted != np.object_:
        return array
    if spec.datatype == "BYTES":
        return texts(spec, array)
    if spec.datatype == "BF16" and array.dtype == np.uint16:
        return array.view(BF16)
    raise InvalidInput(
        f"{spec.name}: the model takes {wanted}, and this array is {array.dtype}: use .astype(...)", field=spec.name
    )


def cast(spec: TensorSpec, value: Any) -> Array:
    """As `as_array`, and arrays of another dtype are cast where that loses nothing but precision: what comes from
    outside was not written with this model's dtypes in mind."""
    if isinstance(value, (np.ndarray, np.generic)):
        array, wanted = np.asarray(value), dtype_of(spec.datatype)
        if array.dtype != wanted and wanted.kind in _FROM_KINDS and np.can_cast(array.dtype, wanted, "same_kind"):
            return array.astype(wanted)
        return as_array(spec, array)
    return as_array(spec, value)


def texts(spec: TensorSpec, array: Array) -> Array:
    """Elements of a BYTES tensor as str. InvalidInput for what is not text."""
    found = np.empty(array.shape, np.object_)
    flat = found.reshape(-1)
    for index, element in enumerate(array.reshape(-1).tolist()):
        flat[index] = element if isinstance(element, str) else _text(spec, index, element)
    return found


def _text(spec: TensorSpec, index: int, element: Any) -> str:
    if not isinstance(element, bytes):
        kind = type(element).__name__
        raise InvalidInput(f"{spec.name}: element {index} of a BYTES tensor is text, not {kind}", field=spec.name)
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{spec.name}: element {index} is not UTF-8: {error.reason}", field=spec.name) from None


def _converted(spec: TensorSpec, value: Any) -> Array:
    wanted = dtype_of(spec.datatype)
    if spec.datatype == "BYTES":
        return texts(spec, _object_array(spec, value))
    if spec.datatype == "BF16" and wanted == np.uint16:
        raise InvalidInput(
            f"{spec.name}: BF16 is taken as bytes, or as an array of uint16 with its bits", field=spec.name
        )
    try:
        natural = np.asarray(value)
        if natural.dtype.kind == "U" and wanted.kind == "f":
            natural = _with_number_words(value)
        if natural.dtype == np.float64 and wanted == np.uint64:
            whole = np.asarray(value, np.object_)  # of integers on both sides of 2**63 numpy makes float64
            if all(type(element) is int for element in whole.reshape(-1).tolist()):
                return whole.astype(wanted)
        empty = natural.size == 0
        if not empty and natural.dtype.kind not in _FROM_KINDS.get(wanted.kind, "biuf"):
            raise TypeError(f"{natural.dtype} values")
        with np.errstate(over="ignore"):  # 1e40 is an infinity in float32, as it is where it was written
            return natural.astype(wanted) if wanted.kind not in "iu" or empty else np.asarray(value, wanted)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{spec.name}: this cannot be read as {spec.datatype}: {error}", field=spec.name) from None


def _with_number_words(value: Any) -> Array:
    """Numbers, among which "NaN", "Infinity" and "-Infinity" stand for the numbers that JSON lacks."""
    items = np.asarray(value, np.object_)
    flat = [_NUMBER_WORDS.get(item, item) if isinstance(item, str) else item for item in items.reshape(-1).tolist()]
    if text := next((item for item in flat if not isinstance(item, (int, float))), None):
        raise TypeError(f"{text!r} is not a number")
    return np.array(flat, np.float64).reshape(items.shape)


def _object_array(spec: TensorSpec, value: Any) -> Array:
    """Nested lists of texts; numpy alone would make one array of fixed-size strings, and drop trailing zeros."""
    try:
        return np.array(value, np.object_)
    except ValueError as error:
        raise InvalidInput(f"{spec.name}: {error}", field=spec.name) from None
