"""The SDK's encoding, `application/vnd.gpufn.msgpack`: Python values as they are.

What msgpack would flatten (tuples, sets, arrays, dates ...) is an Ext of its own. A dataclass, msgspec Struct, pydantic
model or enum is a Record: its class's name and its fields. It becomes the same class again where that class is loaded.
What has no form of its own is pickled by cloudpickle and read only with ``allow_pickle=True``, which nobody but a
worker and the caller's SDK passes. numpy, pydantic and cloudpickle are never imported to look at a value: one of theirs
exists only when they are loaded.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from gpufn.errors import InvalidInput

# Ext codes of the SDK's encoding. They are on disk and on the wire: never change one, add new ones.
_TUPLE, _SET, _FROZENSET, _PAIRS, _COMPLEX, _INTEGER = 1, 2, 3, 4, 5, 6
_DATETIME, _DATE, _TIME, _TIMEDELTA, _DECIMAL, _UUID = 10, 11, 12, 13, 14, 15
_ARRAY, _NUMPY_SCALAR = 20, 21
_RECORD = 30
_PICKLE = 40

_PLAIN = (type(None), bool, str, bytes)
_KEYS = (*_PLAIN, float)
_pack = msgspec.msgpack.Encoder().encode


class Record(msgspec.Struct, frozen=True):
    """A value of a class that this process has not loaded: its fields by name, or an enum's value."""

    module: str
    qualname: str
    value: Any


def encode(value: Any) -> bytes:
    """Raises whatever stands in the way of pickling a part of it."""
    return _pack(_wrapped(value))


def _wrapped(value: Any) -> Any:  # noqa: PLR0911  (a table of forms)
    """`value` with an Ext in place of everything that msgpack would flatten."""
    kind = type(value)
    if kind in _PLAIN or kind is float:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else _ext(_INTEGER, str(value))
    if kind is list:
        return [_wrapped(item) for item in value]
    if kind is dict:
        if all(type(key) in _KEYS or (type(key) is int and abs(key) < 1 << 63) for key in value):
            return {key: _wrapped(item) for key, item in value.items()}
        return _ext(_PAIRS, [[_wrapped(key), _wrapped(item)] for key, item in value.items()])
    wrap = _WRAPPERS.get(kind)
    if wrap is not None:
        return wrap(value)
    if isinstance(value, enum.Enum):
        return _ext(_RECORD, [kind.__module__, kind.__qualname__, _wrapped(value.value)])
    fields = fields_of(value)
    if fields is not None:
        return _ext(_RECORD, [kind.__module__, kind.__qualname__, {name: _wrapped(item) for name, item in fields}])
    return _wrapped_numpy(value) or msgspec.msgpack.Ext(_PICKLE, _pickled(value))


def _wrapped_numpy(value: Any) -> msgspec.msgpack.Ext | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return None
    if value.dtype.hasobject or value.dtype.names is not None:
        return None
    if isinstance(value, numpy.generic):
        return _ext(_NUMPY_SCALAR, [value.dtype.str, value.tobytes()])
    return _ext(_ARRAY, [value.dtype.str, value.shape, value.tobytes()])


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _pack(value))


def _datetime(value: datetime.datetime) -> msgspec.msgpack.Ext:
    if value.tzinfo is None or type(value.tzinfo) is datetime.timezone:
        return _ext(_DATETIME, value.isoformat())
    return msgspec.msgpack.Ext(_PICKLE, _pickled(value))  # keeps the name of the zone


def _time(value: datetime.time) -> msgspec.msgpack.Ext:
    return _ext(_TIME, value.isoformat()) if value.tzinfo is None else msgspec.msgpack.Ext(_PICKLE, _pickled(value))


_WRAPPERS: dict[type, Callable[[Any], msgspec.msgpack.Ext]] = {
    tuple: lambda value: _ext(_TUPLE, [_wrapped(item) for item in value]),
    set: lambda value: _ext(_SET, [_wrapped(item) for item in value]),
    frozenset: lambda value: _ext(_FROZENSET, [_wrapped(item) for item in value]),
    complex: lambda value: _ext(_COMPLEX, [value.real, value.imag]),
    datetime.datetime: _datetime,
    datetime.date: lambda value: _ext(_DATE, value.isoformat()),
    datetime.time: _time,
    datetime.timedelta: lambda value: _ext(_TIMEDELTA, [value.days, value.seconds, value.microseconds]),
    decimal.Decimal: lambda value: _ext(_DECIMAL, str(value)),
    uuid.UUID: lambda value: _ext(_UUID, value.bytes),
}


def _pickled(value: Any) -> bytes:
    import cloudpickle  # noqa: PLC0415  (30 ms that most processes never need)

    return bytes(cloudpickle.dumps(value))


def fields_of(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Of a Struct, dataclass or pydantic model, by name; None for anything else."""
    kind = type(value)
    if isinstance(value, msgspec.Struct):
        return ((name, getattr(value, name)) for name in kind.__struct_fields__)
    if _is_dataclass(kind):
        return ((name, getattr(value, name)) for name in kind.__dataclass_fields__ if hasattr(value, name))
    if is_pydantic(kind):
        return iter({**vars(value), **(value.__pydantic_extra__ or {})}.items())
    return None


def _is_dataclass(kind: type) -> bool:
    # Its own, not inherited: a plain subclass of a dataclass may hold more than the fields.
    return "__dataclass_fields__" in vars(kind)


def is_pydantic(kind: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def decode(body: bytes | memoryview, *, allow_pickle: bool) -> Any:
    """With a Record for each value whose class is not loaded here, and for all without `allow_pickle`. Raises
    InvalidInput."""

    def hook(code: int, data: memoryview) -> Any:
        if code == _PICKLE:
            if not allow_pickle:
                raise InvalidInput("a pickled value is not accepted here")
            import cloudpickle  # noqa: PLC0415

            return cloudpickle.loads(data)
        unwrap = _UNWRAPPERS.get(code)
        if unwrap is None:
            raise InvalidInput(f"a value has the unknown form {code}: it was sent by a newer gpufn")
        value = unwrap(msgspec.msgpack.decode(data, ext_hook=hook))
        return _instance(value) if code == _RECORD and allow_pickle else value

    try:
        return msgspec.msgpack.decode(body, ext_hook=hook)
    except InvalidInput:
        raise
    except Exception as error:  # unpickling runs code of the value's own
        raise InvalidInput(f"the body cannot be decoded: {type(error).__name__}: {error}") from error


def _array(parts: list[Any]) -> Any:
    import numpy  # noqa: PLC0415

    dtype, shape, data = parts
    return numpy.frombuffer(bytearray(data), dtype).reshape(shape)  # of a bytearray, so that it can be written to


_UNWRAPPERS: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _PAIRS: dict,
    _COMPLEX: lambda parts: complex(*parts),
    _INTEGER: int,
    _DATETIME: datetime.datetime.fromisoformat,
    _DATE: datetime.date.fromisoformat,
    _TIME: datetime.time.fromisoformat,
    _TIMEDELTA: lambda parts: datetime.timedelta(*parts),
    _DECIMAL: decimal.Decimal,
    _UUID: lambda data: uuid.UUID(bytes=data),
    _ARRAY: _array,
    _NUMPY_SCALAR: lambda parts: _array([parts[0], [1], parts[1]])[0],
    _RECORD: lambda parts: Record(*parts),
}


def _instance(record: Record) -> Any:
    """The value of its class when that is loaded here, as that or as part of the script that runs."""
    for module in (record.module, "__main__"):
        found: Any = sys.modules.get(module)
        for name in record.qualname.split("."):
            found = getattr(found, name, None)
        if isinstance(found, type):
            made = _made(found, record.value)
            if made is not None:
                return made
    return record


def _made(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, enum.Enum):
        return kind(value)
    if not isinstance(value, dict):
        return None
    if issubclass(kind, msgspec.Struct):
        return kind(**value) if set(value) <= set(kind.__struct_fields__) else None
    if _is_dataclass(kind) and set(value) <= set(kind.__dataclass_fields__):
        made = object.__new__(kind)  # as it was: neither __init__ nor __post_init__ runs a second time
        for name, item in value.items():
            object.__setattr__(made, name, item)
        return made
    if is_pydantic(kind):
        return kind.model_construct(**value)
    return None


def plain(value: Any) -> Any:
    """`value` with the fields of each Record in its place."""
    if isinstance(value, Record):
        return plain(value.value)
    if type(value) is list:
        return [plain(item) for item in value]
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(plain(item) for item in value)
    return value


def has_record(value: Any) -> bool:
    if type(value) is dict:
        return any(map(has_record, value.values()))
    if type(value) in (list, tuple):
        return any(map(has_record, value))
    return isinstance(value, Record)
