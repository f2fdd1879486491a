"""Bodies without a schema as arguments of a function. Pure."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.arguments.json_body import decode_json


def arguments_of(method: MethodSpec, content_type: str, body: bytes) -> bytes:
    """Return a body as arguments in JSON.

    A JSON object has the keyword arguments. Any other body is the argument of the parameter that takes bytes, or of the
    only parameter if that takes text. No body means no arguments. Raises InvalidInput.

    >>> text = {"properties": {"name": {"type": "string"}}}
    >>> arguments_of(MethodSpec(parameters=text), "text/plain", b"Ada")
    b'{"name":"Ada"}'
    """
    if not body:
        return b"{}"
    if not is_json(content_type):
        if method.raw_parameter is not None:
            return msgspec.json.encode({method.raw_parameter: base64.b64encode(body).decode()})
        if (name := _text_parameter(method.parameters)) is not None:
            return msgspec.json.encode({name: _text(body)})
    return msgspec.json.encode(_object(body))


def is_json(content_type: str) -> bool:
    """
    >>> is_json("application/json; charset=utf-8"), is_json("application/vnd.a+json"), is_json("text/plain")
    (True, True, False)
    """
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def _text_parameter(parameters: dict[str, Any]) -> str | None:
    """Return the name of the only parameter if it takes text."""
    properties: dict[str, Any] = parameters.get("properties", {})
    if len(properties) != 1:
        return None
    ((name, schema),) = properties.items()
    return name if schema.get("type") == "string" else None


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise InvalidInput("the body is not UTF-8, and this function does not take bytes") from None


def _object(body: bytes) -> dict[str, Any]:
    value = decode_json(body, object)
    if not isinstance(value, dict):
        raise InvalidInput("the body must be a JSON object with the keyword arguments")
    return value
