"""Instances of the classes that hints name, made of the fields that a caller sent. Pure.

The constructor of the class makes each instance. So type hints, constraints, `__post_init__` and validators hold for a
caller of the SDK as they do for JSON (decision 0038). A field keeps a value that JSON lacks, such as an array, a
datetime or another instance, where its hint takes this value.

`Instances.hint` puts a _Check in the place of each part of a hint that msgspec reads otherwise: msgspec takes no
instance of a subclass, no union of several classes, and makes a list of each Sequence.
"""

from __future__ import annotations

import collections
import collections.abc
import copy
import dataclasses
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from gpufn.declare import type_hints
from gpufn.declare.constructor_schema import form_of, made
from gpufn.declare.hint_adapters import Hook, StandIn, readable
from gpufn_core.encoding import native
from gpufn_core.encoding.msgspec_errors import misfit
from gpufn_core.errors import InvalidInput

BYTES: Final = (bytes, bytearray, memoryview)  # and no text: between Python and Python nothing is base64
_CONTAINERS: Final = (list, tuple, set, frozenset, dict)
_COLLECTIONS: Final = (collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter)
_KEPT: Final = (
    *_COLLECTIONS,
    *(collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Collection, collections.abc.Iterable),
    *(collections.abc.Set, collections.abc.MutableSet, collections.abc.Mapping, collections.abc.MutableMapping),
)
_LEFT_OUT: Final[Any] = msgspec.field(default_factory=lambda: msgspec.UNSET)
_NOTHING: Final[Any] = object()


class _Check(StandIn):
    """A part of a hint whose values `make` reads."""

    def __instancecheck__(cls, value: Any) -> bool:  # noqa: N805  (a metaclass)
        return True  # `make` has decided

    def read(cls, value: Any, dec_hook: Hook) -> Any:  # noqa: N805
        try:
            return cls.make(value, dec_hook)
        except msgspec.ValidationError as error:
            raise ValueError(_said(error)) from None


def _check(name: str, make: Callable[[Any, Hook], Any]) -> _Check:
    return _Check(name, (), {"classes": (), "members": (), "make": staticmethod(make)})


class Instances:
    """`dec_hook` reads values for the hints that msgspec does not know, and for each StandIn."""

    def __init__(self, dec_hook: Hook) -> None:
        self._dec_hook = dec_hook
        self._checks: dict[type, _Check] = {}  # each is made before the hints of its fields: a class may hold itself
        self._forms: dict[type, type[msgspec.Struct]] = {}

    def make(self, kind: type[Any], value: Any) -> Any:
        """An instance of `kind` with the fields, or the enum's value, that a caller sent. Raises InvalidInput."""
        try:
            return self._made(kind, value)
        except InvalidInput:
            raise
        except (msgspec.ValidationError, _Misfit) as error:
            said = _said(error) if isinstance(error, msgspec.ValidationError) else str(error)
            raise InvalidInput(f"{kind.__qualname__}: {said}") from error
        except Exception as error:  # of a validator or a constructor of the user's own
            raise InvalidInput(f"{kind.__qualname__}: {type(error).__qualname__}: {error}") from error

    def fitted(self, value: Any, hint: Any) -> Any:
        """`value` as one of `hint`. Raises msgspec.ValidationError."""
        return self._converted(value, self.hint(hint))

    def hint(self, hint: Any) -> Any:  # noqa: PLR0911  (a table of kinds)
        """`hint` for values that come from Python; a bool is a number, as it is in Python."""
        if hint is int or hint is float:
            return hint | bool
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            inner = args[0] if args[0] in (int, float) else self.hint(args[0])  # its bounds are those of a number
            return typing.Annotated[(inner, *args[1:])]
        if origin in (typing.Union, types.UnionType):
            return self._union(tuple(map(self.hint, args)))
        if origin in _CONTAINERS:
            return origin[tuple(map(self.hint, args))] if args else hint
        kind = origin or hint
        if not isinstance(kind, type) or isinstance(kind, StandIn):
            return hint
        if kind in _KEPT:
            return self._collection(kind, tuple(map(self.hint, args)))
        if issubclass(kind, enum.Enum):
            return readable(kind)
        if native.is_pydantic(kind) or not (native.has_form(kind) or typing.is_typeddict(kind)):
            return hint
        return self._checks.get(kind) or self._class(kind)

    def _converted(self, value: Any, hint: Any) -> Any:
        try:
            return msgspec.convert(value, hint, builtin_types=BYTES, dec_hook=self._dec_hook)
        except msgspec.ValidationError:
            plain = _unboxed(value)
            if plain is value:
                raise
            return msgspec.convert(plain, hint, builtin_types=BYTES, dec_hook=self._dec_hook)

    def _made(self, kind: type[Any], value: Any) -> Any:
        if issubclass(kind, enum.Enum):
            return kind(value)
        if issubclass(kind, tuple):
            if not isinstance(value, tuple) or len(value) != len(kind._fields):  # type: ignore[attr-defined]
                raise _Misfit("its fields are not those of the class")
            value = dict(zip(kind._fields, value, strict=True))  # type: ignore[attr-defined]
        if not isinstance(value, dict):
            raise _Misfit("its fields are not those of the class")
        if native.is_pydantic(kind):
            instance, given = _of_model(kind, value), value
        else:
            form = self._forms.get(kind)
            if form is None:
                form = self._forms[kind] = self._form(kind)
            held = self._converted(value, form)
            instance = made(kind, held)
            given = {name: getattr(held, name) for name in held.__struct_fields__}
        _check_kept(kind, value | given, instance)
        return instance

    def _form(self, kind: type[Any]) -> type[msgspec.Struct]:
        """The parameters of its constructor that its instances keep, by the names of the fields."""
        hints = type_hints.of_fields(kind)
        fields = [
            (name, self._readable(hints.get(name, Any)), *([_LEFT_OUT] if has_default else []))
            for name, has_default in _fields_of(kind)
        ]
        return msgspec.defstruct(kind.__name__, fields, kw_only=True)

    def _readable(self, hint: Any) -> Any:
        """Any in place of a hint that msgspec has no idea of, as for parameters."""
        try:
            hint = self.hint(hint)
            msgspec.msgpack.Decoder(hint, dec_hook=self._dec_hook)
        except Exception:
            return Any
        return hint

    def _class(self, kind: Any) -> _Check:
        """Takes an instance, of a subclass too, and makes one of a plain map as JSON does."""
        forms: list[Any] = []

        def make(value: Any, _: Hook) -> Any:
            if isinstance(value, kind if not typing.is_typeddict(kind) else ()):
                return value
            if not forms:
                forms.append(form_of(kind, self._readable))
            if forms[0] is None:
                raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
            return made(kind, self._converted(value, forms[0]))

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
            found, why = _NOTHING, []
            for member in members:
                try:
                    read = self._converted(value, member)
                except msgspec.ValidationError as error:
                    why.append(_said(error))
                    continue
                if type(read) is type(value):
                    return read  # it needed no conversion
                found = read if found is _NOTHING else found
            if found is _NOTHING:
                raise ValueError("; ".join(why))
            return found

        return _check("union", make)

    def _collection(self, kind: type[Any], items: tuple[Any, ...]) -> _Check:
        """Takes a collection as it is where its items are as their hint says."""
        is_map = issubclass(kind, collections.abc.Mapping)
        plain: Any = dict if is_map else list
        if items:  # a Counter has the type of its keys only
            plain = plain[(*items, Any)[:2] if is_map else items[0]]

        def make(value: Any, _: Hook) -> Any:
            if not isinstance(value, kind) or isinstance(value, (str, *BYTES)):
                raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
            if not isinstance(value, (*_CONTAINERS, *_COLLECTIONS)):
                return value  # an array or a table
            given: Any = dict(value) if is_map else list(value)
            return _with_items(value, given, self._converted(given, plain))

        return _check(kind.__name__, make)


class _Misfit(ValueError):
    """Fields that no instance can have."""


def model_of(kind: Any, value: Any, **how: Any) -> Any:
    """An instance of a pydantic model. Raises ValueError with the first fault."""
    pydantic = sys.modules["pydantic"]
    try:
        return kind.model_validate(value, **how)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _Misfit(f"{where}: {first['msg']}" if where else first["msg"]) from None


def _of_model(kind: Any, fields: dict[str, Any]) -> Any:
    """Of its fields by their names, whatever aliases they have."""
    if getattr(kind, "__pydantic_root_model__", False):
        return model_of(kind, fields.get("root"))
    if "by_name" in inspect.signature(kind.model_validate).parameters:
        return model_of(kind, fields, by_name=True)
    aliases = {  # pydantic before 2.11
        name: alias for name, field in kind.model_fields.items() if isinstance(alias := field.validation_alias, str)
    }
    return model_of(kind, {aliases.get(name, name): value for name, value in fields.items()})


def _fields_of(kind: Any) -> Iterable[tuple[str, bool]]:
    """The names of what the constructor takes and the instance keeps, and whether each has a default."""
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


def _check_kept(kind: Any, sent: Mapping[str, Any], instance: Any) -> None:
    """Refuse an instance that the constructor changed: the function would compute with other values than its caller.

    Fields that do not count in comparisons may change, such as a cache.
    """
    uncompared = {each.name for each in dataclasses.fields(kind) if not each.compare} if _is_dataclass(kind) else ()
    for name, before in sent.items():
        after = getattr(instance, name, before)
        if after is before or type(after) is not type(before) or name in uncompared:
            continue
        if _differ(before, after):
            raise _Misfit(
                f"{name}: the constructor makes another value than the one that was sent; "
                "send a dict of what the constructor takes"
            )


def _is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _differ(before: Any, after: Any) -> bool:
    try:
        return bool(before != after) and not bool(before != before)  # noqa: PLR0124  (NaN)
    except Exception:  # arrays
        return False


def _with_items(value: Any, given: Any, read: Any) -> Any:
    """`value` itself where no item was converted, else a copy with the items that were read."""
    pairs = zip(given.items(), read.items(), strict=True) if isinstance(given, dict) else zip(given, read, strict=True)
    if all(_is_same(before, after) for before, after in pairs):
        return value
    if type(value) in (tuple, set, frozenset):
        return type(value)(read)
    new = copy.copy(value)
    new.clear()
    new.update(read) if isinstance(read, dict) else new.extend(read)
    return new


def _is_same(before: Any, after: Any) -> bool:
    if type(before) is tuple and type(after) is tuple:  # a key and its value
        return len(before) == len(after) and all(map(_is_same, before, after))
    return before is after or (type(before) is type(after) and type(before) in (int, str, bytes) and before == after)


def _unboxed(value: Any) -> Any:
    """`value` with Python's numbers in the places of numpy's; `value` itself where it has none."""
    numpy = sys.modules.get("numpy")
    return value if numpy is None else _without_boxes(value, numpy.generic)


def _without_boxes(value: Any, box: type) -> Any:
    if isinstance(value, box):
        return value.item()  # type: ignore[attr-defined]
    kind = type(value)
    if kind is dict:
        items: Any = {key: _without_boxes(item, box) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else items
    if kind in (list, tuple):
        items = [_without_boxes(item, box) for item in value]
        return value if all(map(_identical, items, value)) else kind(items)
    return value


def _identical(one: Any, other: Any) -> bool:
    return one is other


def _said(error: msgspec.ValidationError) -> str:
    """``Expected `int`, got `str` - at `$.x` `` as ``x: expected int, got str``."""
    found = misfit(str(error))
    text = found.text.replace("bool | ", "")  # that a bool is a number goes without saying
    return f"{found.at}: {text}" if found.at else text
