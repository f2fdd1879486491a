"""Classes that msgspec reads through us, in the places of hints that it refuses. Pure.

    an Enum whose values are not all text, or all whole numbers     its member
    a dataclass with InitVars, a class with such a hint in a field  made by its own constructor
    a union of several classes with fields, and None                the first that fits, those with all keys before

`readable` puts a StandIn in the place of each, in containers and classes too; not of a class that has itself in a
field, which msgspec refuses then. To msgspec a StandIn is a class of somebody else's: it asks `schema_hook` for its
JSON Schema, `dec_hook` for its values, and whether these are instances of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import msgspec

from gpufn.declare.constructor_schema import form_of, made
from gpufn_core.encoding.msgspec_errors import misfit

_CONTAINERS = (list, tuple, set, frozenset, dict, Sequence, Collection, Iterable, Set, Mapping)
Hook = Callable[[Any, Any], Any]
_Classes = tuple[type, ...]


class StandIn(type):
    """A class whose instances are values of `classes`. `make` gives one of a plain value, or raises ValueError."""

    classes: tuple[type, ...]
    members: tuple[Any, ...]  # hints, of which a value fits one; none for an Enum
    make: Callable[[Any, Hook], Any]

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.classes)

    def read(cls, value: Any, dec_hook: Hook) -> Any:
        """`value`, as decoded, as one of `classes`. Raises ValueError."""
        if isinstance(value, cls.classes) and not isinstance(value, dict):  # a TypedDict is read whatever it is
            return value
        try:
            return cls.make(value, dec_hook)
        except msgspec.ValidationError as error:  # which msgspec would hand on without the path to this value
            raise ValueError(_said(error)) from None


def readable(hint: Any, within: _Classes = ()) -> Any:
    """`hint`, with StandIns where msgspec needs them; `within`: of a field of these classes, which it leaves alone.

    >>> class Pace(enum.Enum):
    ...     SLOW = 0.5
    ...     FAST = 2.0
    >>> readable(list[Pace])
    list[gpufn.declare.hint_adapters.Pace]
    >>> readable(Pace).read(2.0, None)
    <Pace.FAST: 2.0>
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return typing.Annotated[(readable(args[0], within), *args[1:])]
    if origin in (typing.Union, types.UnionType):
        union = _union(tuple(readable(arg, within) for arg in args))
        return hint if union == hint else union
    if origin in _CONTAINERS:
        parts = tuple(readable(arg, within) for arg in args)
        return hint if parts == args else origin[parts]
    if not isinstance(hint, type) or origin is not None or _is_read(hint):
        return hint
    return _enum(hint) if issubclass(hint, enum.Enum) else _class(hint, within)


def _is_read(hint: Any) -> bool:
    with contextlib.suppress(TypeError):
        msgspec.json.Decoder(hint)
        return True
    return False


def _stand_in(name: str, classes: tuple[type, ...], members: tuple[Any, ...], make: Any) -> StandIn:
    return StandIn(name, (), {"classes": classes, "members": members, "make": staticmethod(make)})


def _enum(kind: type[enum.Enum]) -> StandIn:
    def make(value: Any, _: Hook) -> enum.Enum:
        try:
            return kind(tuple(value) if isinstance(value, list) else value)
        except ValueError:
            known = ", ".join(repr(member.value) for member in kind)
            raise ValueError(f"{value!r} is none of {known}") from None

    return _stand_in(kind.__name__, (kind,), (), make)


def _class(kind: type, within: _Classes) -> Any:
    """What msgspec reads is a Struct with the parameters of its constructor; `kind` is made of them."""
    if kind in within:
        return kind
    form = form_of(kind, lambda hint: readable(hint, (*within, kind)))
    if form is None or not _is_read(form):
        return kind
    is_dict = typing.is_typeddict(kind)

    def make(value: Any, dec_hook: Hook) -> Any:
        return made(kind, msgspec.convert(value, form, dec_hook=dec_hook, str_keys=True))

    return _stand_in(kind.__name__, (dict if is_dict else kind,), (form,), make)


def _union(members: tuple[Any, ...]) -> Any:
    """msgspec takes a StandIn or None, and no third."""
    union: Any = typing.Union[members]  # noqa: UP007
    of_classes = [each for each in members if each is not types.NoneType]
    if len(of_classes) < 2 or not all(map(_has_fields, of_classes)) or _is_read(union):
        return union
    classes = tuple(cls for each in of_classes for cls in (each.classes if isinstance(each, StandIn) else (each,)))
    name = " or ".join(cls.__name__ for cls in classes)

    def make(value: Any, dec_hook: Hook) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"expected {name}, got {type(value).__name__}")
        why = []
        for each in sorted(of_classes, key=lambda each: not value.keys() <= _names_of(each)):
            try:
                return msgspec.convert(value, each, dec_hook=dec_hook, str_keys=True)
            except msgspec.ValidationError as error:
                why.append(f"no {each.__name__}: {_said(error)}")
        raise ValueError("; ".join(why))

    either = _stand_in(name, classes, tuple(of_classes), make)
    return either if len(of_classes) == len(members) else typing.Optional[either]  # noqa: UP045


def _said(error: msgspec.ValidationError) -> str:
    """``Expected `int`, got `str` - at `$.x` `` as ``x: expected int, got str``."""
    found = misfit(str(error))
    return f"{found.at}: {found.text}" if found.at else found.text


def _has_fields(member: Any) -> bool:
    if isinstance(member, StandIn):
        return bool(member.members) and all(map(_has_fields, member.classes))
    return isinstance(member, type) and (dataclasses.is_dataclass(member) or issubclass(member, msgspec.Struct))


def _names_of(member: Any) -> set[str]:
    if isinstance(member, StandIn):
        return {name for part in member.members for name in _names_of(part)}
    if issubclass(member, msgspec.Struct):
        return set(member.__struct_encode_fields__)
    return {field.name for field in dataclasses.fields(member)}
