"""Build instances of the classes in hints from the fields that a caller sent. Pure.

The class's constructor creates each instance, so type hints, constraints, `__post_init__` and validators apply to SDK
callers as they do to JSON (decision 0038). A field keeps a value that JSON cannot express, such as an array, a datetime
or another instance, if its hint accepts it.

`Instances.hint` replaces the parts of a hint for which msgspec has other rules by a _Check. msgspec accepts no
instances of subclasses and no unions of several classes, and turns each Sequence into a list.
"""

from __future__ import annotations

import collections
import collections.abc
import copy
import dataclasses
import enum
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from gpufn.declare.hints import type_hints
from gpufn.declare.hints.constructor_schema import construct, constructor_struct
from gpufn.declare.hints.hint_adapters import HintAdapter, Hook, adapt_hint
from gpufn_core.encoding import native
from gpufn_core.encoding.msgspec_errors import parse_validation_error
from gpufn_core.errors import InvalidInput

BYTES: Final = (bytes, bytearray, memoryview)  # never text: values from Python are not base64
_CONTAINERS: Final = (list, tuple, set, frozenset, dict)
_COLLECTIONS: Final = (collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter)
_COLLECTION_HINTS: Final = (
    *_COLLECTIONS,
    *(collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Collection, collections.abc.Iterable),
    *(collections.abc.Set, collections.abc.MutableSet, collections.abc.Mapping, collections.abc.MutableMapping),
)
_OMITTED: Final[Any] = msgspec.field(default_factory=lambda: msgspec.UNSET)
_NO_RESULT: Final[Any] = object()


class _Check(HintAdapter):
    """A part of a hint whose values are converted by `make`."""

    def __instancecheck__(cls, value: Any) -> bool:  # noqa: N805  (a metaclass)
        return True  # `make` decides

    def read(cls, value: Any, dec_hook: Hook) -> Any:  # noqa: N805
        try:
            return cls.make(value, dec_hook)
        except msgspec.ValidationError as error:
            raise ValueError(_error_text(error)) from None


def _check(name: str, make: Callable[[Any, Hook], Any]) -> _Check:
    return _Check(name, (), {"classes": (), "members": (), "make": staticmethod(make)})


class Instances:
    """Instances for the hints of one function. `dec_hook` converts values for StandIns and for hints that msgspec does
    not know."""

    def __init__(self, dec_hook: Hook) -> None:
        self._dec_hook = dec_hook
        self._checks: dict[type, _Check] = {}  # filled before the hints of the fields: a class may contain itself
        self._forms: dict[type, type[msgspec.Struct]] = {}

    def make(self, kind: type[Any], value: Any) -> Any:
        """Build an instance of `kind` from the fields or enum value that a caller sent. Raises InvalidInput."""
        try:
            return self._make_instance(kind, value)
        except InvalidInput:
            raise
        except (msgspec.ValidationError, _MismatchError) as error:
            text = _error_text(error) if isinstance(error, msgspec.ValidationError) else str(error)
            raise InvalidInput(f"{kind.__qualname__}: {text}") from error
        except Exception as error:  # raised by a user's validator or constructor
            raise InvalidInput(f"{kind.__qualname__}: {type(error).__qualname__}: {error}") from error

    def convert(self, value: Any, hint: Any) -> Any:
        """Convert `value` to `hint`. Raises msgspec.ValidationError."""
        return self._convert_value(value, self.hint(hint))

    def hint(self, hint: Any) -> Any:  # noqa: PLR0911  (a table of kinds)
        """Adapt `hint` to values from Python, where a bool is also a number."""
        if hint is int or hint is float:
            return hint | bool
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            inner = args[0] if args[0] in (int, float) else self.hint(args[0])  # constraints apply to numbers only
            return typing.Annotated[(inner, *args[1:])]
        if origin in (typing.Union, types.UnionType):
            return self._union(tuple(map(self.hint, args)))
        if origin in _CONTAINERS:
            return origin[tuple(map(self.hint, args))] if args else hint
        kind = origin or hint
        if not isinstance(kind, type) or isinstance(kind, HintAdapter):
            return hint
        if kind in _COLLECTION_HINTS:
            return self._collection(kind, tuple(map(self.hint, args)))
        if issubclass(kind, enum.Enum):
            return adapt_hint(kind)
        if native.is_pydantic(kind) or not (native.has_form(kind) or typing.is_typeddict(kind)):
            return hint
        return self._checks.get(kind) or self._class(kind)

    def _convert_value(self, value: Any, hint: Any) -> Any:
        try:
            return msgspec.convert(value, hint, builtin_types=BYTES, dec_hook=self._dec_hook)
        except msgspec.ValidationError:
            plain = _unbox(value)
            if plain is value:
                raise
            return msgspec.convert(plain, hint, builtin_types=BYTES, dec_hook=self._dec_hook)

    def _make_instance(self, kind: type[Any], value: Any) -> Any:
        if issubclass(kind, enum.Enum):
            return kind(value)
        if issubclass(kind, tuple):
            if not isinstance(value, tuple) or len(value) != len(kind._fields):  # type: ignore[attr-defined]
                raise _MismatchError("its fields do not match the class")
            value = dict(zip(kind._fields, value, strict=True))  # type: ignore[attr-defined]
        if not isinstance(value, dict):
            raise _MismatchError("its fields do not match the class")
        if native.is_pydantic(kind):
            instance, sent = _of_model(kind, value), value
        else:
            form = self._forms.get(kind)
            if form is None:
                form = self._forms[kind] = self._form(kind)
            decoded = self._convert_value(value, form)
            instance = construct(kind, decoded)
            sent = {name: getattr(decoded, name) for name in decoded.__struct_fields__}
        _check_unchanged(kind, value | sent, instance)
        return instance

    def _form(self, kind: type[Any]) -> type[msgspec.Struct]:
        """Return a struct of the constructor parameters that instances keep, by field name."""
        hints = type_hints.field_hints(kind)
        fields = [
            (name, self._adapt_hint(hints.get(name, Any)), *([_OMITTED] if has_default else []))
            for name, has_default in _fields_of(kind)
        ]
        return msgspec.defstruct(kind.__name__, fields, kw_only=True)

    def _adapt_hint(self, hint: Any) -> Any:
        """Return the adapted hint, or Any for a hint that msgspec does not support, as for parameters."""
        try:
            hint = self.hint(hint)
            msgspec.msgpack.Decoder(hint, dec_hook=self._dec_hook)
        except Exception:
            return Any
        return hint

    def _class(self, kind: Any) -> _Check:
        """Check that accepts instances, also of subclasses, and builds an instance from a plain dict as JSON does."""
        forms: list[Any] = []

        def make(value: Any, _: Hook) -> Any:
            if isinstance(value, kind if not typing.is_typeddict(kind) else ()):
                return value
            if not forms:
                forms.append(constructor_struct(kind, self._adapt_hint))
            if forms[0] is None:
                raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
            return construct(kind, self._convert_value(value, forms[0]))

        check = self._checks[kind] = _check(kind.__name__, make)
        return check

    def _union(self, members: tuple[Any, ...]) -> Any:
        union: Any = typing.Union[members]  # noqa: UP007  (`|` of a tuple)
        try:
            msgspec.msgpack.Decoder(union, dec_hook=self._dec_hook)
            return union
        except TypeError:
            pass

        def make(value: Any, _: Hook) -> Any:
            result, reasons = _NO_RESULT, []
            for member in members:
                try:
                    converted = self._convert_value(value, member)
                except msgspec.ValidationError as error:
                    reasons.append(_error_text(error))
                    continue
                if type(converted) is type(value):
                    return converted  # no conversion was needed
                result = converted if result is _NO_RESULT else result
            if result is _NO_RESULT:
                raise ValueError("; ".join(reasons))
            return result

        return _check("union", make)

    def _collection(self, kind: type[Any], items: tuple[Any, ...]) -> _Check:
        """Check that keeps a collection if its items match their hint."""
        is_map = issubclass(kind, collections.abc.Mapping)
        plain: Any = dict if is_map else list
        if items:  # a Counter only has a key type
            plain = plain[(*items, Any)[:2] if is_map else items[0]]

        def make(value: Any, _: Hook) -> Any:
            if not isinstance(value, kind) or isinstance(value, (str, *BYTES)):
                raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
            if not isinstance(value, (*_CONTAINERS, *_COLLECTIONS)):
                return value  # such as an array or a table
            plain_value: Any = dict(value) if is_map else list(value)
            return _with_items(value, plain_value, self._convert_value(plain_value, plain))

        return _check(kind.__name__, make)


class _MismatchError(ValueError):
    """Fields that do not fit the class."""


def model_of(kind: Any, value: Any, **options: Any) -> Any:
    """Return an instance of a pydantic model. Raises ValueError with the first error."""
    pydantic = sys.modules["pydantic"]
    try:
        return kind.model_validate(value, **options)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _MismatchError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def _of_model(kind: Any, fields: dict[str, Any]) -> Any:
    """Return a pydantic model made from its fields by name, independent of aliases."""
    if getattr(kind, "__pydantic_root_model__", False):
        return model_of(kind, fields.get("root"))
    if "by_name" in inspect.signature(kind.model_validate).parameters:
        return model_of(kind, fields, by_name=True)
    aliases = {  # pydantic before 2.11
        name: alias for name, field in kind.model_fields.items() if isinstance(alias := field.validation_alias, str)
    }
    return model_of(kind, {aliases.get(name, name): value for name, value in fields.items()})


def _fields_of(kind: Any) -> Iterable[tuple[str, bool]]:
    """Yield the fields that are both constructor parameters and attributes, and whether each has a default."""
    if issubclass(kind, msgspec.Struct):
        return ((field.name, not field.required) for field in msgspec.structs.fields(kind))
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return (
            (field.name, field.default is not missing or field.default_factory is not missing)
            for field in dataclasses.fields(kind)
            if field.init
        )
    return ((name, name in kind._field_defaults) for name in kind._fields)


def _check_unchanged(kind: Any, sent: Mapping[str, Any], instance: Any) -> None:
    """Raise if the constructor changed a value: the function would compute with other values than its caller sent.

    Fields that are excluded from comparisons, such as a cache, may change.
    """
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    uncompared = {field.name for field in fields if not field.compare}
    for name, before in sent.items():
        after = getattr(instance, name, before)
        if after is before or type(after) is not type(before) or name in uncompared:
            continue
        if _differ(before, after):
            raise _MismatchError(
                f"{name}: the constructor changes the value that was sent; "
                "send a dict of the constructor's parameters instead"
            )


def _differ(before: Any, after: Any) -> bool:
    try:
        return bool(before != after) and not bool(before != before)  # noqa: PLR0124  (NaN)
    except Exception:  # for example arrays
        return False


def _with_items(value: Any, original: Any, converted: Any) -> Any:
    """Return `value` if no item was converted, else a copy with the converted items."""
    pairs = (
        zip(original.items(), converted.items(), strict=True)
        if isinstance(original, dict)
        else zip(original, converted, strict=True)
    )
    if all(_is_same(before, after) for before, after in pairs):
        return value
    if type(value) in (tuple, set, frozenset):
        return type(value)(converted)
    new = copy.copy(value)
    new.clear()
    new.update(converted) if isinstance(converted, dict) else new.extend(converted)
    return new


def _is_same(before: Any, after: Any) -> bool:
    if type(before) is tuple and type(after) is tuple:  # a key and its value
        return len(before) == len(after) and all(map(_is_same, before, after))
    return before is after or (type(before) is type(after) and type(before) in (int, str, bytes) and before == after)


def _unbox(value: Any) -> Any:
    """Return `value` with numpy scalars replaced by Python numbers, or `value` itself if there are none."""
    numpy = sys.modules.get("numpy")
    return value if numpy is None else _replace_scalars(value, numpy.generic)


def _replace_scalars(value: Any, box: type) -> Any:
    if isinstance(value, box):
        return value.item()  # type: ignore[attr-defined]
    kind = type(value)
    if kind is dict:
        items: Any = {key: _replace_scalars(item, box) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else items
    if kind in (list, tuple):
        items = [_replace_scalars(item, box) for item in value]
        return value if all(map(operator.is_, items, value)) else kind(items)
    return value


def _error_text(error: msgspec.ValidationError) -> str:
    """Format ``Expected `int`, got `str` - at `$.x` `` as ``x: expected int, got str``."""
    mismatch = parse_validation_error(str(error))
    text = mismatch.text.replace("bool | ", "")  # an implementation detail: bool counts as a number
    return f"{mismatch.at}: {text}" if mismatch.at else text
