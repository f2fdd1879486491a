"""The SDK's encoding of Python values, `application/vnd.gpufn.msgpack`.

Types that msgpack would flatten (tuples, sets, arrays, dates ...) are Ext values. A dataclass, msgspec Struct, pydantic
model, NamedTuple or enum is a record: the name of its class, and its fields. The decoder creates an instance only of a
class that its caller allows (`find`), which is a class named by a type hint. Any other record decodes to its fields: a
dict, a tuple, or the value of an enum. `gpufn_core.encoding.library_values` has the values of numpy, pandas, torch and
other libraries.

A value without a form raises NoForm. `encode(..., may_pickle=True)` pickles such a value instead and returns a Pickled,
which is sent as `application/vnd.gpufn.pickle`. `decode` reads a pickle only with `allow_pickle=True`. A pickle runs
code when it is read (decision 0030).
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from gpufn_core.errors import InvalidInput

# Ext codes of the SDK's encoding. They are stored on disk and sent on the wire: never change one, only add new ones.
# 20 to 29 belong to `gpufn_core.encoding.library_values`.
_TUPLE, _SET, _FROZENSET, _PAIRS, _COMPLEX, _INTEGER = 1, 2, 3, 4, 5, 6
_RANGE, _BYTEARRAY, _COLLECTION = 7, 8, 9
_DATETIME, _DATE, _TIME, _TIMEDELTA, _DECIMAL, _UUID = 10, 11, 12, 13, 14, 15
_ZONED_DATETIME, _ZONED_TIME, _PATH = 16, 17, 18
_LIBRARY: Final = range(20, 30)
_RECORD = 30
_OLD_PICKLE = 40  # earlier releases put pickles into all arguments
_PICKLE = 41  # the name of its type, for error messages, and the pickle

_PLAIN = (type(None), bool, str, bytes)
_KEYS = (*_PLAIN, float)
_MAX_DIGITS: Final = 4300  # the limit of Python's int(text), which takes quadratic time
_MAX_DECIMAL_DIGITS: Final = 10_000
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, tuple)}
_pack = msgspec.msgpack.Encoder().encode

# Names of the forms in error messages.
_NAMES: Final = {
    _TUPLE: "tuple", _SET: "set", _FROZENSET: "frozenset", _PAIRS: "dict", _COMPLEX: "complex number",
    _INTEGER: "whole number", _RANGE: "range", _BYTEARRAY: "bytearray", _COLLECTION: "collection",
    _DATETIME: "datetime", _DATE: "date", _TIME: "time", _TIMEDELTA: "timedelta", _DECIMAL: "Decimal", _UUID: "UUID",
    _ZONED_DATETIME: "datetime", _ZONED_TIME: "time", _PATH: "path", _RECORD: "record of a class",
    _OLD_PICKLE: "pickle", _PICKLE: "pickle",
}  # fmt: skip
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")

FindClass = Callable[[str, str], "type[Any] | None"]
MakeInstance = Callable[["type[Any]", Any], Any]


class NoForm(TypeError):
    """The value can be sent only as a pickle."""

    def __init__(self) -> None:
        super().__init__("its type is not supported without pickles, which run code when they are read")


class Pickled(bytes):
    """Encoded values that include a pickle."""


def encode(value: Any, *, may_pickle: bool = False) -> bytes:
    """Encode `value`; return a Pickled if a part had to be pickled. Raises NoForm, or the error of a failed pickle."""
    if not may_pickle:
        return _pack(_wrap(value, _reject))
    pickles = 0

    def pickled(part: Any) -> msgspec.msgpack.Ext:
        nonlocal pickles
        pickles += 1
        return _ext(_PICKLE, [type_name(type(part)), _pickled(part)])

    body = _pack(_wrap(value, pickled))
    return Pickled(body) if pickles else body


def type_name(kind: type) -> str:
    name = kind.__qualname__
    return name if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{name}"


_Rest = Callable[[Any], msgspec.msgpack.Ext]


def _reject(value: Any) -> msgspec.msgpack.Ext:
    raise NoForm


def _wrap(value: Any, rest: _Rest) -> Any:  # noqa: PLR0911  (a table of forms)
    """`value` with an Ext for everything that msgpack would flatten; `rest` encodes values without a form."""
    kind = type(value)
    if kind in _PLAIN or kind is float:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else _ext(_INTEGER, str(value))
    if kind is list:
        return [_wrap(item, rest) for item in value]
    if kind is dict:
        if all(type(key) in _KEYS or (type(key) is int and abs(key) < 1 << 63) for key in value):
            return {key: _wrap(item, rest) for key, item in value.items()}
        return _ext(_PAIRS, _pairs(value, rest))
    if kind in _SEQUENCES:
        return _ext(_SEQUENCES[kind], [_wrap(item, rest) for item in value])
    wrap = _WRAPPERS.get(kind)
    if wrap is not None:
        return wrap(value) or rest(value)
    if kind in _COLLECTIONS:
        return _wrap_collection(value, rest) or rest(value)
    if isinstance(value, enum.Enum):
        return _ext(_RECORD, [kind.__module__, kind.__qualname__, _wrap(value.value, rest)])
    if _is_named_tuple(kind):
        return _ext(_RECORD, [kind.__module__, kind.__qualname__, _wrap(tuple(value), rest)])
    fields = fields_of(value)
    if fields is not None:
        return _ext(_RECORD, [kind.__module__, kind.__qualname__, {name: _wrap(item, rest) for name, item in fields}])
    if kind.__module__.startswith("pathlib"):
        return _path(value) or rest(value)
    from gpufn_core.encoding import library_values  # noqa: PLC0415  (its import takes 1 ms, and most processes never use it)

    form = library_values.form_of(value)
    return rest(value) if form is None else _ext(*form)


def _pairs(value: Any, rest: _Rest) -> list[list[Any]]:
    return [[_wrap(key, rest), _wrap(item, rest)] for key, item in value.items()]


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _pack(value))


def _zone_of(value: datetime.datetime | datetime.time) -> str | None:
    """Return the name of its IANA time zone; None for any other time zone."""
    zone = value.tzinfo
    kind = type(zone)
    return getattr(zone, "key", None) if kind.__module__.startswith("zoneinfo") else None


def _dated(plain: int, zoned: int, value: datetime.datetime | datetime.time) -> msgspec.msgpack.Ext | None:
    """Encode as `plain` without a time zone or with a fixed offset, as `zoned` with an IANA time zone."""
    if value.tzinfo is None or type(value.tzinfo) is datetime.timezone:
        return _ext(plain, value.isoformat())
    zone = _zone_of(value)
    return None if zone is None else _ext(zoned, [value.replace(tzinfo=None).isoformat(), zone, value.fold])


def _path(value: Any) -> msgspec.msgpack.Ext | None:
    name = type(value).__name__
    is_plain = name in _PATHS and vars(sys.modules["pathlib"])[name] is type(value)
    return _ext(_PATH, [name, str(value)]) if is_plain else None


def _wrap_collection(value: Any, rest: _Rest) -> msgspec.msgpack.Ext | None:
    name = type(value).__name__
    if isinstance(value, collections.deque):
        return _ext(_COLLECTION, [name, [_wrap(item, rest) for item in value], value.maxlen])
    detail = None
    if isinstance(value, collections.defaultdict) and value.default_factory is not None:
        detail = getattr(value.default_factory, "__name__", "")
        if _FACTORIES.get(detail) is not value.default_factory:
            return None
    return _ext(_COLLECTION, [name, _pairs(value, rest), detail])


_SEQUENCES: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_COLLECTIONS = {collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque}
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}
_WRAPPERS: dict[type, Callable[[Any], msgspec.msgpack.Ext | None]] = {
    complex: lambda value: _ext(_COMPLEX, [value.real, value.imag]),
    range: lambda value: _ext(_RANGE, [str(value.start), str(value.stop), str(value.step)]),
    bytearray: lambda value: _ext(_BYTEARRAY, value),
    datetime.datetime: functools.partial(_dated, _DATETIME, _ZONED_DATETIME),
    datetime.date: lambda value: _ext(_DATE, value.isoformat()),
    datetime.time: functools.partial(_dated, _TIME, _ZONED_TIME),
    datetime.timedelta: lambda value: _ext(_TIMEDELTA, [value.days, value.seconds, value.microseconds]),
    decimal.Decimal: lambda value: _ext(_DECIMAL, str(value)),
    uuid.UUID: lambda value: _ext(_UUID, value.bytes),
}


def _pickled(value: Any) -> bytes:
    import cloudpickle  # noqa: PLC0415  (its import takes 30 ms, and most processes never use it)

    return bytes(cloudpickle.dumps(value))


def fields_of(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return the fields of a Struct, dataclass or pydantic model; None for anything else."""
    kind = type(value)
    if isinstance(value, msgspec.Struct):
        return ((name, getattr(value, name)) for name in kind.__struct_fields__)
    if _is_dataclass(kind):
        names = (field.name for field in dataclasses.fields(kind))  # without ClassVars and InitVars
        return ((name, getattr(value, name)) for name in names if hasattr(value, name))
    if is_pydantic(kind):
        return iter({**vars(value), **(value.__pydantic_extra__ or {})}.items())
    return None


def _is_dataclass(kind: type) -> bool:
    # Not inherited: a plain subclass of a dataclass may have more than the fields.
    return "__dataclass_fields__" in vars(kind)


def is_pydantic(kind: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and "_fields" in vars(kind) and "__slots__" in vars(kind)


def decode(
    body: bytes | memoryview,
    *,
    allow_pickle: bool = False,
    find: FindClass | None = None,
    make: MakeInstance | None = None,
    remedy: str = "",
) -> Any:
    """Decode `body`. Raises InvalidInput; `remedy` is appended to the message that rejects a pickle.

    A record becomes an instance of the class that `find` returns for its module and qualified name, or else its fields.
    `make` creates the instance from the class and the fields; by default the instance gets the fields that were sent.
    """
    make = make or restored

    def hook(code: int, data: memoryview) -> Any:
        try:
            if code in (_PICKLE, _OLD_PICKLE):
                return _unpickled(code, data, allow_pickle=allow_pickle, remedy=remedy)
            if code in _LIBRARY:
                from gpufn_core.encoding import library_values  # noqa: PLC0415

                return library_values.value_of(code, data)
            unwrap = _UNWRAPPERS.get(code)
            if unwrap is not None:
                return unwrap(msgspec.msgpack.decode(data, ext_hook=hook))
            if code == _RECORD:
                return _of_record(msgspec.msgpack.decode(data, ext_hook=hook), find, make)
        except (InvalidInput, RecursionError):
            raise
        except Exception as error:  # its text may show private data
            raise InvalidInput(_unhashable(error) or f"a {_NAMES[code]} was sent in a damaged form") from error
        raise InvalidInput(f"a value has the unknown form {code}: a newer gpufn sent it")

    try:
        return msgspec.msgpack.decode(body, ext_hook=hook)
    except InvalidInput:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the body cannot be decoded: {error}") from error
    except RecursionError as error:
        raise InvalidInput("the body is nested too deeply to be decoded") from error
    except Exception as error:
        raise InvalidInput(_unhashable(error) or "the body cannot be decoded") from error


def _unhashable(error: Exception) -> str:
    if not isinstance(error, TypeError) or "unhashable" not in str(error):
        return ""
    return (
        "a set or the keys of a dict contain an unhashable value: an instance decodes to a dict of its fields, "
        "unless a type hint names its class"
    )


def _unpickled(code: int, data: memoryview, *, allow_pickle: bool, remedy: str) -> Any:
    if code == _OLD_PICKLE:
        raise InvalidInput("a value was pickled by an earlier release of gpufn, which is no longer supported")
    name, pickle = msgspec.msgpack.decode(data, type=tuple[str, memoryview])
    if not allow_pickle:
        raise InvalidInput(f"a {name[:200]} was sent as a pickle, which runs code when it is read{remedy}")
    import cloudpickle  # noqa: PLC0415

    try:
        return cloudpickle.loads(pickle)
    except Exception as error:  # raised by the value's own code, such as the import of a module that is missing here
        message = _ADDRESS.sub("", f"{type(error).__name__}: {error}")
        raise InvalidInput(f"a pickle of a {name[:200]} cannot be read: {message}") from error


def _integer(text: str) -> int:
    _check_digits("an integer", text, _MAX_DIGITS)
    return int(text)


def _decimal(text: str) -> decimal.Decimal:
    _check_digits("a Decimal", text, _MAX_DECIMAL_DIGITS)
    return decimal.Decimal(text)


def _check_digits(what: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidInput(f"{what} of {len(text):,} digits is longer than the {limit:,} that are accepted")


def _zoned(read: Callable[[str], Any], parts: list[Any]) -> Any:
    import zoneinfo  # noqa: PLC0415

    text, zone, fold = parts
    try:
        known = zoneinfo.ZoneInfo(zone)
    except (zoneinfo.ZoneInfoNotFoundError, OSError, ValueError):
        raise InvalidInput(f"the time zone {str(zone)[:80]!r} is unknown here") from None
    return read(text).replace(tzinfo=known, fold=fold)


def _path_of(parts: list[Any]) -> Any:
    import pathlib  # noqa: PLC0415

    name, text = parts
    if name not in _PATHS:
        raise InvalidInput(f"{str(name)[:80]!r} is not a class of pathlib")
    return getattr(pathlib, name)(text)


def _collection(parts: list[Any]) -> Any:
    name, content, detail = parts
    if name == "deque":
        return collections.deque(content, detail)
    if name == "defaultdict":
        return collections.defaultdict(None if detail is None else _FACTORIES[detail], content)
    if name == "Counter":
        return collections.Counter(dict(content))
    if name != "OrderedDict":
        raise InvalidInput(f"{str(name)[:80]!r} is not a supported collection")
    return collections.OrderedDict(content)


_UNWRAPPERS: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _PAIRS: dict,
    _COMPLEX: lambda parts: complex(*parts),
    _INTEGER: _integer,
    _RANGE: lambda parts: range(*map(_integer, parts)),
    _BYTEARRAY: bytearray,
    _COLLECTION: _collection,
    _DATETIME: datetime.datetime.fromisoformat,
    _DATE: datetime.date.fromisoformat,
    _TIME: datetime.time.fromisoformat,
    _TIMEDELTA: lambda parts: datetime.timedelta(*parts),
    _DECIMAL: _decimal,
    _UUID: lambda data: uuid.UUID(bytes=data),
    _ZONED_DATETIME: functools.partial(_zoned, datetime.datetime.fromisoformat),
    _ZONED_TIME: functools.partial(_zoned, datetime.time.fromisoformat),
    _PATH: _path_of,
}


def _of_record(parts: Any, find: FindClass | None, make: MakeInstance) -> Any:
    module, qualname, value = parts
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise InvalidInput("a record must name its class by two texts")
    found = None if find is None else find(module, qualname)
    instance = None if found is None else make(found, value)
    return value if instance is None else instance


def loaded_class(module: str, qualname: str) -> type[Any] | None:
    """Return the loaded class of that name, from that module or from the running script: a `find` for values from a
    trusted sender."""
    for each in (module, "__main__"):
        found: Any = sys.modules.get(each)
        for name in qualname.split("."):
            found = getattr(found, name, None)
        if isinstance(found, type) and has_form(found):
            return found
    return None


def has_form(kind: type) -> bool:
    """Return whether instances of `kind` are sent as records."""
    is_known = issubclass(kind, (enum.Enum, msgspec.Struct))
    return is_known or _is_dataclass(kind) or is_pydantic(kind) or _is_named_tuple(kind)


def restored(kind: type[Any], value: Any) -> Any:  # noqa: PLR0911  (a table of kinds)
    """Return an instance with the fields of a trusted sender's instance; None if the fields do not fit `kind`.

    The fields are not checked: see `gpufn_runtime.worker.arguments.instances` for untrusted senders.
    """
    if issubclass(kind, enum.Enum):
        return kind(value)
    if _is_named_tuple(kind):
        is_match = isinstance(value, tuple) and len(value) == len(kind._fields)
        return tuple.__new__(kind, value) if is_match else None
    if not isinstance(value, dict):
        return None
    if issubclass(kind, msgspec.Struct):
        return kind(**value) if set(value) <= set(kind.__struct_fields__) else None
    if _is_dataclass(kind) and set(value) <= set(kind.__dataclass_fields__):
        instance = object.__new__(kind)  # neither __init__ nor __post_init__ runs a second time
        for name, item in value.items():
            object.__setattr__(instance, name, item)
        return instance
    if is_pydantic(kind):
        return kind.model_construct(**value)
    return None
