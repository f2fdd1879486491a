"""Description of the differences between a function's arguments in two specs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gpufn_core.spec.function_spec import MethodSpec

_NO_DEFAULT = object()
_ANY = "any"
_ITSELF = "the call without a method"  # a function that became a class, or the reverse


def signature_changes(before: Iterable[MethodSpec], after: Iterable[MethodSpec]) -> list[str]:
    """Return one line per added, removed or changed argument or method."""
    old, new = ({method.name: method for method in methods} for methods in (before, after))
    changes = [f"{name or _ITSELF} is removed" for name in old if name not in new]
    changes += [f"{name or _ITSELF} is added" for name in new if name not in old]
    for name in new.keys() & old.keys():
        prefix = f"{name}: " if name else ""
        changes += [f"{prefix}{change}" for change in _argument_changes(old[name].parameters, new[name].parameters)]
    return sorted(changes)


def _argument_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = before.get("properties") or {}, after.get("properties") or {}
    was_required, is_required = set(before.get("required") or ()), set(after.get("required") or ())
    for name in old:
        if name not in new:
            yield f"{name} is removed"
    for name, schema in new.items():
        if name not in old:
            yield f"{name} is added, {'required' if name in is_required else _default(schema)}"
            continue
        previous = old[name]
        if _type(previous, before) != _type(schema, after):
            yield f"{name} changes its type from {_type_name(previous)} to {_type_name(schema)}"
        if name in is_required and name not in was_required:
            yield f"{name} is required now"
        elif name in was_required and name not in is_required:
            yield f"{name} is no longer required, {_default(schema)}"
        elif previous.get("default", _NO_DEFAULT) != schema.get("default", _NO_DEFAULT):
            yield f"{name} changes its default from {_value(previous)} to {_value(schema)}"


def _type(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
    """Return a schema without its default, and the definitions that it may refer to."""
    stripped = {key: value for key, value in schema.items() if key != "default"}
    return stripped, (whole.get("$defs") if "$ref" in str(stripped) else None)


def _default(schema: Mapping[str, Any]) -> str:
    return f"default {_value(schema)}" if "default" in schema else "optional"


def _value(schema: Mapping[str, Any]) -> str:
    return msgspec.json.encode(schema["default"]).decode() if "default" in schema else "none"


def _type_name(schema: Mapping[str, Any]) -> str:
    """Name a schema's type, such as `integer`, `array of string` or `string or null`."""
    if choices := schema.get("anyOf"):
        return " or ".join(_type_name(choice) for choice in choices)
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = schema.get("type", _ANY)
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    items = schema.get("items")
    return f"{kind} of {_type_name(items)}" if isinstance(items, dict) and items else str(kind)
