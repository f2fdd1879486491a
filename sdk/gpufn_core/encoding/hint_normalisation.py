"""What classes in type hints mean to msgspec, where that is not what they mean to Python. Pure.

- A field of a dataclass with `init=False` is worked out by the class itself: no caller has to give it. msgspec requires
  it where it has no default.
- Members of a Flag are added up: each sum is one. For msgspec's JSON Schema only the members are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

_WITH_FIELDS = (msgspec.Struct, tuple, dict)  # a NamedTuple is a tuple, a TypedDict a dict


def classes_in(hint: Any) -> Iterator[type]:
    """The classes of `hint`, and of the fields of those that msgspec looks into; each once."""
    seen: set[Any] = set()
    left = [hint]
    while left:
        part = left.pop()
        left += typing.get_args(part)
        kind = typing.get_origin(part) or part
        if not isinstance(kind, type) or kind in seen:
            continue
        seen.add(kind)
        yield kind
        if dataclasses.is_dataclass(kind) or issubclass(kind, _WITH_FIELDS):
            with contextlib.suppress(Exception):  # names that only type checkers know
                left += typing.get_type_hints(kind, include_extras=True).values()


@contextlib.contextmanager
def computed_fields_optional(hint: Any) -> Iterator[None]:
    """What msgspec makes of `hint` inside the `with` does not require fields that the dataclass works out itself.

    msgspec asks each field for its default once, and gives that to an instance before `__post_init__`.
    """
    computed = [
        field
        for kind in classes_in(hint)
        if dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
        if not field.init and field.default is field.default_factory is dataclasses.MISSING
    ]
    for field in computed:
        field.default_factory = _unset
    try:
        yield
    finally:
        for field in computed:
            field.default_factory = dataclasses.MISSING


def _unset() -> msgspec.UnsetType:
    return msgspec.UNSET


def flag_schemas(hint: Any) -> dict[str, dict[str, Any]]:
    """The JSON Schemas of the Flags in `hint`, by name."""
    flags = (kind for kind in classes_in(hint) if issubclass(kind, enum.Flag))
    return {flag.__name__: _schema_of(flag) for flag in flags}


def _schema_of(flag: type[enum.Flag]) -> dict[str, Any]:
    members = ", ".join(f"{member.value} ({member.name})" for member in flag)
    return {"title": flag.__name__, "type": "integer", "description": f"a sum of {members}"}
