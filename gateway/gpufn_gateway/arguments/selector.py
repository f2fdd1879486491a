"""The parameters of a variant from the selector of its name, in canonical form. Pure.

`size=big&layers=2` has values without types, which are read like those of a query. `{"size": "big"}`, percent-encoded,
has JSON. A parameter that has its default is left out, so that all spellings of a variant are the same one.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.variant_names import MAX_SELECTOR_BYTES
from gpufn_gateway.arguments import query
from gpufn_gateway.arguments.signature import Signature

_JSON: Final = ("{", "%7B", "%7b")


def parameters_of(selector: str, schema: Mapping[str, Any], function: str) -> dict[str, Any]:
    """Return the parameters that a selector sets, without those that have their default. `schema` is the JSON Schema of
    the constructor of `function`. Raises InvalidInput with the field."""
    if len(selector) > MAX_SELECTOR_BYTES:
        raise InvalidInput(f"the parameters of {function} exceed {MAX_SELECTOR_BYTES:,} bytes: pass a reference")
    properties: Mapping[str, Any] = schema.get("properties", {})
    if not properties and not schema.get("additionalProperties"):
        raise InvalidInput(f"{function} has no parameters: call it without parentheses")
    signature = Signature(schema)
    given = _from_json(selector, signature) if selector.startswith(_JSON) else _from_query(selector, signature)
    values = {name: _canonical(value, properties.get(name)) for name, value in given.items()}
    return {name: value for name, value in values.items() if not _is_default(value, properties.get(name))}


def _from_json(selector: str, signature: Signature) -> dict[str, Any]:
    text = urllib.parse.unquote(selector).encode()
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidInput("the text in parentheses is not a JSON object: write NAME=VALUE") from None
    for name in given:
        query.check_name(name, signature, signature.names, "the constructor")
    signature.check(text)
    return given


def _from_query(selector: str, signature: Signature) -> dict[str, Any]:
    texts = query.texts_by_name(selector.encode())
    for name in texts:
        query.check_name(name, signature, signature.names, "the constructor")
    values = query.values(texts, signature, raw_names=())
    return msgspec.json.decode(msgspec.json.encode(values), type=dict[str, Any])  # bytes as base64 text


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
