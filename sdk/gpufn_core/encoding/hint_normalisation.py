"""Adjustments for classes in type hints that msgspec interprets differently than Python. Pure.

- A dataclass computes its fields with `init=False` itself, so callers do not pass them. msgspec requires such a field
  if it has no default.
- Every combination of members of a Flag is valid. In msgspec's JSON Schema only the members are.
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
    """Yield the classes in `hint`, and in the fields of classes that msgspec decodes; each once."""
    seen: set[Any] = set()
    pending = [hint]
    while pending:
        part = pending.pop()
        pending += typing.get_args(part)
        kind = typing.get_origin(part) or part
        if not isinstance(kind, type) or kind in seen:
            continue
        seen.add(kind)
        yield kind
        if dataclasses.is_dataclass(kind) or issubclass(kind, _WITH_FIELDS):
            with contextlib.suppress(Exception):  # names that exist only for type checkers
                pending += typing.get_type_hints(kind, include_extras=True).values()


@contextlib.contextmanager
def computed_fields_optional(hint: Any) -> Iterator[None]:
    """Within the `with`, msgspec decoders for `hint` do not require fields that a dataclass computes itself.

    msgspec reads the default of each field once, and sets it on an instance before `__post_init__`.
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
    """Return the JSON Schemas of the Flags in `hint`, by name."""
    flags = (kind for kind in classes_in(hint) if issubclass(kind, enum.Flag))
    return {flag.__name__: _schema_of(flag) for flag in flags}


def _schema_of(flag: type[enum.Flag]) -> dict[str, Any]:
    members = ", ".join(f"{member.value} ({member.name})" for member in flag)
    return {"title": flag.__name__, "type": "integer", "description": f"a sum of {members}"}
