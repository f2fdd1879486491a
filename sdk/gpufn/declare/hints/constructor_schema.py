"""msgspec Structs for the constructors of classes: the parameters with their hints and defaults. Pure.

Supports dataclasses with their InitVars, msgspec.Struct, NamedTuple and TypedDict.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

_REQUIRED: Any = msgspec.NODEFAULT
_OPTIONAL: Any = msgspec.field(default_factory=lambda: msgspec.UNSET)
_Field = tuple[str, Any, Any]


def constructor_struct(cls: type, adapt_hint: Callable[[Any], Any]) -> type[msgspec.Struct] | None:
    """Return a Struct with the parameters of the constructor of `cls`.

    Return None for any other class, and if msgspec cannot read such a Struct. `adapt_hint` replaces each hint by a hint
    that msgspec can read.
    """
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception:  # names that only type checkers know
        return None
    options: dict[str, Any] = {"kw_only": True}
    if dataclasses.is_dataclass(cls):
        fields = list(_of_dataclass(cls, hints))
    elif issubclass(cls, msgspec.Struct):
        fields = [(field.name, hints[field.name], _default(field)) for field in msgspec.structs.fields(cls)]
        config = cls.__struct_config__
        options |= {name: getattr(config, name) for name in ("tag", "tag_field", "array_like", "forbid_unknown_fields")}
        options["rename"] = dict(zip(cls.__struct_fields__, cls.__struct_encode_fields__, strict=True))
    elif typing.is_typeddict(cls):
        fields = list(_of_typed_dict(cls, hints))
    elif issubclass(cls, tuple) and hasattr(cls, "_field_defaults"):
        fields = [(name, hints.get(name, Any), cls._field_defaults.get(name, _REQUIRED)) for name in cls._fields]  # type: ignore[attr-defined]
        options |= {"array_like": True, "forbid_unknown_fields": True}
    else:
        return None
    try:
        return msgspec.defstruct(
            cls.__name__, [(name, adapt_hint(hint), *rest) for name, hint, *rest in fields], **options
        )
    except TypeError:
        return None


def construct(cls: type, decoded: msgspec.Struct) -> Any:
    """Return an instance of `cls`, made by its constructor from an instance of its `constructor_struct`."""
    fields = ((name, getattr(decoded, name)) for name in decoded.__struct_fields__)
    return cls(**{name: value for name, value in fields if value is not msgspec.UNSET})


def _of_dataclass(cls: Any, hints: dict[str, Any]) -> Iterator[_Field]:
    for field in cls.__dataclass_fields__.values():  # `dataclasses.fields` has no InitVars
        hint = hints[field.name]
        if isinstance(hint, dataclasses.InitVar):
            hint = hint.type
        elif typing.get_origin(hint) is typing.ClassVar or not field.init:
            continue
        yield field.name, hint, _default(field, dataclasses.MISSING)


def _of_typed_dict(cls: Any, hints: dict[str, Any]) -> Iterator[_Field]:
    for name, hint in hints.items():
        # `__required_keys__` does not reflect Required and NotRequired in hints that were strings.
        match typing.get_origin(hint):
            case typing.Required:
                yield name, typing.get_args(hint)[0], _REQUIRED
            case typing.NotRequired:
                yield name, typing.get_args(hint)[0], _OPTIONAL
            case _:
                yield name, hint, _REQUIRED if name in cls.__required_keys__ else _OPTIONAL


def _default(field: Any, missing: Any = msgspec.NODEFAULT) -> Any:
    if field.default is not missing:
        return field.default
    return _REQUIRED if field.default_factory is missing else msgspec.field(default_factory=field.default_factory)
