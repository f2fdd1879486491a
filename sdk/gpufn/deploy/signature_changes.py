"""How the arguments of a function differ between two specs, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gpufn_core.spec.function_spec import MethodSpec

_NO_DEFAULT = object()
_ANY = "any"


def signature_changes(before: Iterable[MethodSpec], after: Iterable[MethodSpec]) -> list[str]:
    """One line per argument, or method, that was added, removed or changed."""
    old, new = ({method.name: method for method in methods} for methods in (before, after))
    changes = [f"{name} is removed" for name in old if name not in new]
    changes += [f"{name} is added" for name in new if name not in old]
    for name in new.keys() & old.keys():
        prefix = f"{name}: " if name else ""
        changes += [f"{prefix}{change}" for change in _arguments(old[name].parameters, new[name].parameters)]
    return sorted(changes)


def _arguments(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = before.get("properties") or {}, after.get("properties") or {}
    was_required, is_required = set(before.get("required") or ()), set(after.get("required") or ())
    for name in old:
        if name not in new:
            yield f"{name} is removed"
    for name, schema in new.items():
        if name not in old:
            yield f"{name} is added, {'required' if name in is_required else _default(schema)}"
            continue
        was = old[name]
        if _type(was, before) != _type(schema, after):
            yield f"{name} changes its type from {_words(was)} to {_words(schema)}"
        if name in is_required and name not in was_required:
            yield f"{name} is required now"
        elif name in was_required and name not in is_required:
            yield f"{name} is no longer required, {_default(schema)}"
        elif was.get("default", _NO_DEFAULT) != schema.get("default", _NO_DEFAULT):
            yield f"{name} changes its default from {_value(was)} to {_value(schema)}"


def _type(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
    """Everything but the default, with the definitions that it may refer to."""
    bare = {key: value for key, value in schema.items() if key != "default"}
    return bare, (whole.get("$defs") if "$ref" in str(bare) else None)


def _default(schema: Mapping[str, Any]) -> str:
    return f"default {_value(schema)}" if "default" in schema else "optional"


def _value(schema: Mapping[str, Any]) -> str:
    return msgspec.json.encode(schema["default"]).decode() if "default" in schema else "none"


def _words(schema: Mapping[str, Any]) -> str:
    """Such as `integer`, `array of string`, `string or null`."""
    if choices := schema.get("anyOf"):
        return " or ".join(_words(choice) for choice in choices)
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = schema.get("type", _ANY)
    if isinstance(kind, list):
        return " or ".join(map(str, kind))
    items = schema.get("items")
    return f"{kind} of {_words(items)}" if isinstance(items, dict) and items else str(kind)
