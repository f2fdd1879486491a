"""Adapters for type hints that msgspec refuses. Pure.

    hint                                                            value
    an Enum whose values are not all str, or all int                a member
    a dataclass with InitVars, a class with such a hint in a field  an instance, made by its own constructor
    a union of several classes with fields, and None                an instance of the first class that fits; classes
                                                                    that have all the keys come first

`adapt_hint` replaces each such hint with a HintAdapter, in containers and classes too. It does not replace a class that
has itself in a field, so msgspec refuses that class. msgspec treats a HintAdapter as a custom type. It calls
`schema_hook` for the JSON Schema and `dec_hook` for a value, and checks the value with `isinstance`.
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

from gpufn.declare.hints.constructor_schema import construct, constructor_struct
from gpufn_core.encoding.msgspec_errors import parse_validation_error

_CONTAINERS = (list, tuple, set, frozenset, dict, Sequence, Collection, Iterable, Set, Mapping)
Hook = Callable[[Any, Any], Any]
_Classes = tuple[type, ...]


class HintAdapter(type):
    """The type of adapters. Values of `classes` are instances of the adapter.

    `make` converts a plain value to a value of `classes`, or raises ValueError.
    """

    classes: tuple[type, ...]
    members: tuple[Any, ...]  # the hints that a value may fit; empty for an Enum
    make: Callable[[Any, Hook], Any]

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.classes)

    def read(cls, value: Any, dec_hook: Hook) -> Any:
        """Convert a decoded value to a value of `classes`. Raises ValueError."""
        if isinstance(value, cls.classes) and not isinstance(value, dict):  # a TypedDict's fields need a check
            return value
        try:
            return cls.make(value, dec_hook)
        except msgspec.ValidationError as error:  # msgspec adds the path of this value to a ValueError only
            raise ValueError(_error_text(error)) from None


def adapt_hint(hint: Any, within: _Classes = ()) -> Any:
    """Return `hint` with a HintAdapter for each part that msgspec refuses.

    `within` lists the classes whose fields are being read; they are not replaced again.

    >>> class Pace(enum.Enum):
    ...     SLOW = 0.5
    ...     FAST = 2.0
    >>> adapt_hint(list[Pace])
    list[gpufn.declare.hints.hint_adapters.Pace]
    >>> adapt_hint(Pace).read(2.0, None)
    <Pace.FAST: 2.0>
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return typing.Annotated[(adapt_hint(args[0], within), *args[1:])]
    if origin in (typing.Union, types.UnionType):
        union = _adapt_union(tuple(adapt_hint(arg, within) for arg in args))
        return hint if union == hint else union
    if origin in _CONTAINERS:
        parts = tuple(adapt_hint(arg, within) for arg in args)
        return hint if parts == args else origin[parts]
    if not isinstance(hint, type) or origin is not None or _is_supported(hint):
        return hint
    return _adapt_enum(hint) if issubclass(hint, enum.Enum) else _adapt_class(hint, within)


def _is_supported(hint: Any) -> bool:
    """Return whether msgspec can read `hint` without an adapter."""
    with contextlib.suppress(TypeError):
        msgspec.json.Decoder(hint)
        return True
    return False


def _adapter(name: str, classes: tuple[type, ...], members: tuple[Any, ...], make: Any) -> HintAdapter:
    return HintAdapter(name, (), {"classes": classes, "members": members, "make": staticmethod(make)})


def _adapt_enum(kind: type[enum.Enum]) -> HintAdapter:
    def make(value: Any, _: Hook) -> enum.Enum:
        try:
            return kind(tuple(value) if isinstance(value, list) else value)
        except ValueError:
            known = ", ".join(repr(member.value) for member in kind)
            raise ValueError(f"{value!r} is none of {known}") from None

    return _adapter(kind.__name__, (kind,), (), make)


def _adapt_class(kind: type, within: _Classes) -> Any:
    """Return an adapter that reads a Struct with the constructor's parameters and calls the constructor with them."""
    if kind in within:
        return kind
    form = constructor_struct(kind, lambda hint: adapt_hint(hint, (*within, kind)))
    if form is None or not _is_supported(form):
        return kind
    is_dict = typing.is_typeddict(kind)

    def make(value: Any, dec_hook: Hook) -> Any:
        return construct(kind, msgspec.convert(value, form, dec_hook=dec_hook, str_keys=True))

    return _adapter(kind.__name__, (dict if is_dict else kind,), (form,), make)


def _adapt_union(members: tuple[Any, ...]) -> Any:
    """Return one adapter for several classes: msgspec supports a union of a custom type and None, but no third type."""
    union: Any = typing.Union[members]  # noqa: UP007
    candidates = [member for member in members if member is not types.NoneType]
    if len(candidates) < 2 or not all(map(_has_fields, candidates)) or _is_supported(union):
        return union
    classes = tuple(
        cls for member in candidates for cls in (member.classes if isinstance(member, HintAdapter) else (member,))
    )
    name = " or ".join(cls.__name__ for cls in classes)

    def make(value: Any, dec_hook: Hook) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"expected {name}, got {type(value).__name__}")
        errors = []
        for candidate in sorted(candidates, key=lambda candidate: not value.keys() <= _field_names(candidate)):
            try:
                return msgspec.convert(value, candidate, dec_hook=dec_hook, str_keys=True)
            except msgspec.ValidationError as error:
                errors.append(f"not a {candidate.__name__}: {_error_text(error)}")
        raise ValueError("; ".join(errors))

    adapter = _adapter(name, classes, tuple(candidates), make)
    return adapter if len(candidates) == len(members) else typing.Optional[adapter]  # noqa: UP045


def _error_text(error: msgspec.ValidationError) -> str:
    """Rewrite ``Expected `int`, got `str` - at `$.x` `` as ``x: expected int, got str``."""
    mismatch = parse_validation_error(str(error))
    return f"{mismatch.at}: {mismatch.text}" if mismatch.at else mismatch.text


def _has_fields(member: Any) -> bool:
    if isinstance(member, HintAdapter):
        return bool(member.members) and all(map(_has_fields, member.classes))
    return isinstance(member, type) and (dataclasses.is_dataclass(member) or issubclass(member, msgspec.Struct))


def _field_names(member: Any) -> set[str]:
    if isinstance(member, HintAdapter):
        return {name for part in member.members for name in _field_names(part)}
    if issubclass(member, msgspec.Struct):
        return set(member.__struct_encode_fields__)
    return {field.name for field in dataclasses.fields(member)}
