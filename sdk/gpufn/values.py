"""Python values ↔ bytes: what calls and results look like on their way.

| content type | who speaks it | what it keeps |
|---|---|---|
| `application/json` | anybody | JSON: arrays become lists, datetimes text, bytes base64, NaN and infinities `null` |
| `application/msgpack` | anybody | the same map, with bytes as they are |
| `application/vnd.gpufn.msgpack` | the SDK, the worker | Python values: tuples, sets, arrays, dataclasses, pickles |
| anything else | anybody | bytes |

A dataclass, msgspec Struct, pydantic model or enum travels in the SDK's encoding as a Record: its class's name and its
fields. It becomes the same class again where that class is loaded, or where a parameter is annotated with it; else
the plain fields. What has no form of its own is pickled by cloudpickle and read only with ``allow_pickle=True``, which
nobody but a worker and the caller's SDK passes. numpy, pydantic, torch and cloudpickle are never imported to look at
a value: one of theirs exists only when they are loaded.
"""

from __future__ import annotations

import collections.abc
import datetime
import decimal
import enum
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from gpufn import media
from gpufn.errors import InvalidInput, ResultNotEncodable, UnsupportedMediaType
from gpufn.protocol.limits import INLINE_BYTES, REQUEST_BYTES

JSON, MSGPACK, NATIVE, BYTES = media.JSON, media.MSGPACK, media.NATIVE, media.BYTES
media_type = media.media_type

# Ext codes of the SDK's encoding. They are on disk and on the wire: never change one, add new ones.
_TUPLE, _SET, _FROZENSET, _PAIRS, _COMPLEX, _INTEGER = 1, 2, 3, 4, 5, 6
_DATETIME, _DATE, _TIME, _TIMEDELTA, _DECIMAL, _UUID = 10, 11, 12, 13, 14, 15
_ARRAY, _NUMPY_SCALAR = 20, 21
_RECORD = 30
_PICKLE = 40

_PLAIN = (type(None), bool, str, bytes)
_KEYS = (*_PLAIN, float)
_MAX_PATH = 12  # how deep `_locate` looks


class Record(msgspec.Struct, frozen=True):
    """A value of a class that this process has not loaded: its fields by name, or an enum's value."""

    module: str
    qualname: str
    value: Any


class Encoded(NamedTuple):
    """A result in its final form, whatever its caller accepts. The body is its parts, one after the other."""

    content_type: str
    parts: tuple[bytes | memoryview, ...]


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A call in the SDK's encoding, NATIVE. InvalidInput names the argument that cannot be sent.

    >>> decode_call(encode_call((1, (2, 3)), {"top": {4}}))
    ([1, (2, 3)], {'top': {4}})
    """
    value = {"args": list(args), "kwargs": kwargs}
    try:
        body = _encode_native(value)
    except Exception as error:
        path, culprit = _locate(value, _encode_native)
        name = path.removeprefix(".kwargs.").removeprefix(".")
        raise InvalidInput(f"{name}: {_described(culprit)} cannot be sent: {error}", field=name) from error
    if len(body) > REQUEST_BYTES:
        raise InvalidInput(
            f"the arguments take {len(body):,} bytes, more than the {REQUEST_BYTES:,} of one call: "
            "store them where the function can read them, and send where that is"
        )
    return body


def decode_call(body: bytes | memoryview, *, allow_pickle: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in the SDK's encoding, with a Record for each value whose class is not loaded here."""
    value = _decode_native(body, allow_pickle=allow_pickle)
    if not isinstance(value, dict):
        raise InvalidInput("a call is a map with 'args' and 'kwargs'")
    args, kwargs = value.get("args", []), value.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise InvalidInput("a call's 'args' is an array and its 'kwargs' a map from names")
    return args, kwargs


def encode_result(
    value: Any, accept: str, *, limit_bytes: int = INLINE_BYTES, what: str = "result"
) -> tuple[str, bytes]:
    """`value` for a caller that accepts `accept`: content type and body. ResultNotEncodable says what is in the way,
    and calls the value `what`.

    >>> encode_result({"labels": ("cat", "dog")}, "application/json")
    ('application/json', b'{"labels":["cat","dog"]}')
    """
    kind, parts = encode_parts(value, accept, limit_bytes=limit_bytes, what=what)
    return kind, b"".join(parts)


def encode_parts(value: Any, accept: str, *, limit_bytes: int, what: str = "result") -> Encoded:
    """As `encode_result`, and nothing large is copied to make one block of the body."""
    if isinstance(value, Encoded):
        _check_size(sum(map(len, value.parts)), limit_bytes)
        return value
    kind = _chosen(accept)
    if kind == JSON and isinstance(value, (bytes, bytearray, memoryview)):
        kind, body = BYTES, bytes(value)
    else:
        encode = _ENCODERS[kind]
        try:
            body = encode(value)
        except RecursionError as error:
            raise ResultNotEncodable(f"the {what} contains itself, or is nested too deeply to be sent") from error
        except Exception as error:
            path, culprit = _locate(value, encode)
            raise ResultNotEncodable(
                f"the {what}{path and f' at {path}'} is {_described(culprit)}, which cannot be sent as {kind}: {error}"
            ) from error
    _check_size(len(body), limit_bytes)
    return Encoded(kind, (body,))


def _check_size(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise ResultNotEncodable(
            f"the result takes {size:,} bytes, more than the {limit_bytes:,} of one call: "
            "store it and return where it is, or yield it in parts"
        )


def decode_value(content_type: str, body: bytes, *, allow_pickle: bool = False) -> Any:
    """The value of a result or an item, for a caller in Python.

    >>> decode_value(*encode_result((1, {2}), NATIVE))
    (1, {2})
    """
    kind = media_type(content_type)
    if kind == JSON:
        return msgspec.json.decode(body) if body else None
    if kind == MSGPACK:
        return msgspec.msgpack.decode(body)
    if kind == NATIVE:
        return plain(_decode_native(body, allow_pickle=allow_pickle))
    return body


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


# --- JSON and msgpack: for anybody -----------------------------------------------------------------------------------


def _chosen(accept: str) -> str:
    for part in accept.split(","):
        kind = media_type(part) if part.strip() else JSON
        if kind in _ENCODERS:
            return kind
    return JSON


def _simpler(value: Any) -> Any:  # noqa: PLR0911  (a table of types)
    """`value` in types that JSON has; TypeError when there is no obvious way. (msgspec's enc_hook.)"""
    if type(value) in (list, tuple, dict, set, frozenset):  # JSON has these: we are asked because it stands for a key
        raise TypeError("a key of a map has to be text or a number")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.ndarray):
            return value.tolist()
        if isinstance(value, numpy.generic):
            item = value.item()
            if not isinstance(item, numpy.generic):
                return item
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if _is_pydantic(type(value)):
        return value.model_dump(by_alias=True)
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, collections.abc.Mapping):
        return dict(value)
    if isinstance(value, (collections.abc.Sequence, collections.abc.Set, collections.abc.ValuesView)):
        return list(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{_type_name(type(value))} has no JSON form")


# --- the SDK's encoding ----------------------------------------------------------------------------------------------


def _encode_native(value: Any) -> bytes:
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
    fields = _fields(value)
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


def _fields(value: Any) -> Iterator[tuple[str, Any]] | None:
    kind = type(value)
    if isinstance(value, msgspec.Struct):
        return ((name, getattr(value, name)) for name in kind.__struct_fields__)
    if _is_dataclass(kind):
        return ((name, getattr(value, name)) for name in kind.__dataclass_fields__ if hasattr(value, name))
    if _is_pydantic(kind):
        return iter({**vars(value), **(value.__pydantic_extra__ or {})}.items())
    return None


def _is_dataclass(kind: type) -> bool:
    # Its own, not inherited: a plain subclass of a dataclass may hold more than the fields.
    return "__dataclass_fields__" in vars(kind)


def _is_pydantic(kind: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def _decode_native(body: bytes | memoryview, *, allow_pickle: bool) -> Any:
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
    if _is_pydantic(kind):
        return kind.model_construct(**value)
    return None


# --- saying what is wrong --------------------------------------------------------------------------------------------


def _type_name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _described(value: Any) -> str:
    name = _type_name(type(value))
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _locate(value: Any, encode: Callable[[Any], bytes]) -> tuple[str, Any]:
    """Where in `value` the part is that `encode` fails on, as a path, and that part."""
    path = ""
    for _ in range(_MAX_PATH):
        for step, item in _children(value):
            try:
                encode(item)
            except Exception:
                path, value = path + step, item
                break
        else:
            break
    return path, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield (f".{key}" if isinstance(key, str) else f"[{key!r}]"), item
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    else:
        for name, item in _fields(value) or ():
            yield f".{name}", item


_pack = msgspec.msgpack.Encoder().encode
_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    JSON: msgspec.json.Encoder(enc_hook=_simpler).encode,
    MSGPACK: msgspec.msgpack.Encoder(enc_hook=_simpler).encode,
    NATIVE: _encode_native,
}


def unsupported(content_type: str) -> UnsupportedMediaType:
    """The refusal of a body that is neither JSON nor msgpack where no parameter takes bytes."""
    return UnsupportedMediaType(
        f"{content_type!r} is not accepted: send {JSON} or {MSGPACK}, or give the function a bytes parameter"
    )
