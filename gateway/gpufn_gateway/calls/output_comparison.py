"""Comparison of two results of the same call: equal, or the first place where they differ. Pure.

JSON, msgpack and the SDK's encoding are compared value by value, numbers and arrays of floats with a tolerance. A body
of any other type is compared by its bytes.
"""

from __future__ import annotations

import array
import math
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.encoding import media

_ABSOLUTE: Final = 1e-12  # two numbers this close to zero are equal
_TEXT_CHARS: Final = 200
_MAX_DEPTH: Final = 100
_FLOATS: Final = {"<f2": "e", "<f4": "f", "<f8": "d"}


class OutputDifference(NamedTuple):
    """`path` is the place in the value, such as `.scores[2]`; "" for the whole."""

    path: str
    left: str
    right: str


class _Array(NamedTuple):
    """An array of the SDK's encoding: dtype, shape, and its floats, or its bytes for another dtype."""

    dtype: str
    shape: tuple[Any, ...]
    values: Sequence[float] | bytes


def first_difference(left: tuple[str, bytes], right: tuple[str, bytes], tolerance: float) -> OutputDifference | None:
    """Return the first difference between two results, each a content type and a body; None if they are equal.

    >>> first_difference(("application/json", b"[1.0]"), ("application/json", b"[1.0000001]"), 1e-5)
    >>> first_difference(("application/json", b'{"a":[1,2]}'), ("application/json", b'{"a":[1,3]}'), 1e-5)
    OutputDifference(path='.a[1]', left='2', right='3')
    """
    if left == right:
        return None
    kind = media.media_type(left[0])
    if kind != media.media_type(right[0]):
        return OutputDifference("", left[0], right[0])
    if kind not in (media.JSON, media.MSGPACK, media.NATIVE):
        return OutputDifference("", f"{len(left[1]):,} bytes", f"{len(right[1]):,} other bytes")
    try:
        values = _decode(kind, left[1]), _decode(kind, right[1])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return OutputDifference("", f"{len(left[1]):,} bytes", f"{len(right[1]):,} other bytes")
    found = next(_differences(*values, tolerance, "", 0), None)
    return None if found is None else OutputDifference(found[0], _shown(found[1]), _shown(found[2]))


def _decode(kind: str, body: bytes) -> Any:
    if kind == media.JSON:
        return msgspec.json.decode(body)
    return msgspec.msgpack.decode(body, ext_hook=_decode_extension)


def _decode_extension(code: int, data: memoryview) -> Any:
    """Decode the parts of a value of the SDK's encoding, without the library to which it belongs."""
    try:
        parts = msgspec.msgpack.decode(data, ext_hook=_decode_extension)
    except msgspec.DecodeError:
        return code, bytes(data)
    match parts:
        case [str(dtype), [*shape], bytes(content)]:
            return code, _Array(dtype, tuple(shape), _floats(dtype, content))
    return code, parts


def _floats(dtype: str, content: bytes) -> Sequence[float] | bytes:
    letter = _FLOATS.get(dtype)
    if letter is None or len(content) % struct.calcsize(letter):
        return content
    if letter == "e" or sys.byteorder == "big":
        return struct.unpack(f"<{len(content) // struct.calcsize(letter)}{letter}", content)
    return array.array(letter, content)


def _differences(left: Any, right: Any, tolerance: float, path: str, depth: int) -> Iterator[tuple[str, Any, Any]]:
    if _is_number(left) and _is_number(right):
        is_equal = _is_close(left, right, tolerance)
    elif depth < _MAX_DEPTH and (parts := _parts(left, right)) is not None:
        for place, one, other in parts:
            yield from _differences(one, other, tolerance, path + place, depth + 1)
        return
    else:
        is_equal = type(left) is type(right) and left == right
    if not is_equal:
        yield path, left, right


def _parts(left: Any, right: Any) -> Iterator[tuple[str, Any, Any]] | None:
    """Return the parts of two values of the same form, each with its place; None for other values."""
    if isinstance(left, dict) and isinstance(right, dict):
        return ((f".{key}", left[key], right[key]) for key in left) if left.keys() == right.keys() else None
    if isinstance(left, _Array) and isinstance(right, _Array):
        if left[:2] != right[:2] or isinstance(left.values, bytes) or isinstance(right.values, bytes):
            return None
        left, right = left.values, right.values
    elif not (isinstance(left, (list, tuple)) and type(left) is type(right)):
        return None
    if len(left) != len(right):
        return None
    return ((f"[{index}]", one, other) for index, (one, other) in enumerate(zip(left, right, strict=True)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_close(left: float, right: float, tolerance: float) -> bool:
    try:
        is_nan = math.isnan(left) and math.isnan(right)
        return is_nan or math.isclose(left, right, rel_tol=tolerance, abs_tol=_ABSOLUTE)
    except OverflowError:  # an integer beyond every float
        return left == right


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _TEXT_CHARS else f"{text[: _TEXT_CHARS - 1]}…"
