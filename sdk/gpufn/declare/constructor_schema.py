"""What a class is made of, as a msgspec Struct: the parameters of its constructor, with their hints and defaults. Pure.

Of a dataclass (its InitVars too), a msgspec.Struct, a NamedTuple and a TypedDict.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

_NEEDED: Any = msgspec.NODEFAULT
_LEFT_OUT: Any = msgspec.field(default_factory=lambda: msgspec.UNSET)
_Field = tuple[str, Any, Any]


def form_of(kind: type, readable: Callable[[Any], Any]) -> type[msgspec.Struct] | None:
    """None of a class of another kind, or that msgspec cannot read like this. `readable` says what it reads for a
    hint."""
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except Exception:  # names that only type checkers know
        return None
    options: dict[str, Any] = {"kw_only": True}
    if dataclasses.is_dataclass(kind):
        fields = list(_of_dataclass(kind, hints))
    elif issubclass(kind, msgspec.Struct):
        fields = [(field.name, hints[field.name], _default(field)) for field in msgspec.structs.fields(kind)]
        written = kind.__struct_config__
        options |= {
            name: getattr(written, name) for name in ("tag", "tag_field", "array_like", "forbid_unknown_fields")
        }
        options["rename"] = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    elif typing.is_typeddict(kind):
        fields = list(_of_typed_dict(kind, hints))
    elif issubclass(kind, tuple) and hasattr(kind, "_field_defaults"):
        fields = [(name, hints.get(name, Any), kind._field_defaults.get(name, _NEEDED)) for name in kind._fields]  # type: ignore[attr-defined]
        options |= {"array_like": True, "forbid_unknown_fields": True}
    else:
        return None
    try:
        return msgspec.defstruct(
            kind.__name__, [(name, readable(hint), *rest) for name, hint, *rest in fields], **options
        )
    except TypeError:
        return None


def made(kind: type, form: msgspec.Struct) -> Any:
    """A `kind` of what was read in its form."""
    given = {name: value for name in form.__struct_fields__ if (value := getattr(form, name)) is not msgspec.UNSET}
    return kind(**given)


def _of_dataclass(kind: Any, hints: dict[str, Any]) -> Iterator[_Field]:
    for field in kind.__dataclass_fields__.values():  # `dataclasses.fields` has no InitVars
        hint = hints[field.name]
        if isinstance(hint, dataclasses.InitVar):
            hint = hint.type
        elif typing.get_origin(hint) is typing.ClassVar or not field.init:
            continue
        yield field.name, hint, _default(field, dataclasses.MISSING)


def _of_typed_dict(kind: Any, hints: dict[str, Any]) -> Iterator[_Field]:
    for name, hint in hints.items():
        # Where its hints were texts, the class does not know which keys they say this of.
        match typing.get_origin(hint):
            case typing.Required:
                yield name, typing.get_args(hint)[0], _NEEDED
            case typing.NotRequired:
                yield name, typing.get_args(hint)[0], _LEFT_OUT
            case _:
                yield name, hint, _NEEDED if name in kind.__required_keys__ else _LEFT_OUT


def _default(field: Any, missing: Any = msgspec.NODEFAULT) -> Any:
    if field.default is not missing:
        return field.default
    return _NEEDED if field.default_factory is missing else msgspec.field(default_factory=field.default_factory)
