"""The parameters and options of a variant from the selector of its name, in canonical form. Pure.

`size=big&layers=2` has values without types, which are read like the values of a query. `{"size": "big"}`,
percent-encoded, has JSON. A parameter that has its default is omitted, so that all spellings of a variant are equal.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.naming.variant_names import MAX_SELECTOR_BYTES
from gpufn_core.spec.naming.variant_options import MARK, check_names
from gpufn_gateway.arguments import query
from gpufn_gateway.arguments.signature import Signature

_JSON: Final = ("{", "%7B", "%7b")


class Selected(NamedTuple):
    parameters: dict[str, Any]
    options: dict[str, Any]


def read(selector: str, schema: Mapping[str, Any], function: str) -> Selected:
    """Return the parameters that a selector sets, except those with their default. `schema` is the JSON Schema of the
    constructor of `function`. Raises InvalidInput with the field."""
    if len(selector) > MAX_SELECTOR_BYTES:
        raise InvalidInput(f"the parameters of {function} exceed {MAX_SELECTOR_BYTES:,} bytes: pass a reference")
    is_json = selector.startswith(_JSON)
    given = _json_object(selector) if is_json else query.texts_by_name(selector.encode())
    options = {name.removeprefix(MARK): given.pop(name) for name in [*given] if name.startswith(MARK)}
    if not is_json:
        options = {name: _option_of(texts) for name, texts in options.items()}
    check_names(options)
    properties: Mapping[str, Any] = schema.get("properties", {})
    if given and not properties and not schema.get("additionalProperties"):
        raise InvalidInput(f"{function} has no parameters: call it without parentheses")
    if given:
        given = _checked(given, Signature(schema), is_json=is_json)
    values = {name: _canonical(value, properties.get(name)) for name, value in given.items()}
    values = {name: value for name, value in values.items() if not _is_default(value, properties.get(name))}
    return Selected(values, options)


def _json_object(selector: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(urllib.parse.unquote(selector), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidInput("the text in parentheses is not a JSON object: write NAME=VALUE") from None


def _checked(given: dict[str, Any], signature: Signature, *, is_json: bool) -> dict[str, Any]:
    for name in given:
        query.check_name(name, signature, signature.names, "the constructor")
    if is_json:
        signature.check(msgspec.json.encode(given))
        return given
    values = query.values(given, signature, raw_names=())
    return msgspec.json.decode(msgspec.json.encode(values), type=dict[str, Any])  # bytes as base64 text


def _option_of(texts: Sequence[str]) -> Any:
    """Return the value of an option: a number, a text, or with several values a list."""
    values = [query.read_value(text) for text in texts]
    return values[0] if len(values) == 1 else values


def _canonical(value: Any, schema: Any) -> Any:
    """Return 1.0 for 1 where a number is expected, so that both are the same value."""
    is_number = isinstance(schema, Mapping) and schema.get("type") == "number"
    return float(value) if is_number and type(value) is int else value


def _is_default(value: Any, schema: Any) -> bool:
    return isinstance(schema, Mapping) and "default" in schema and _same(value, schema["default"])


def _same(value: Any, default: Any) -> bool:
    """Compare as JSON: in Python, 1 equals True."""
    return msgspec.json.encode(value) == msgspec.json.encode(default) or (
        type(value) is float and type(default) is int and value == default
    )
