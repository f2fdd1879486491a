"""Messages of MCP: requests, and functions and their results as tools. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from gpufn_core.spec.function_spec import MethodSpec

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, SERVER_ERROR = -32700, -32600, -32601, -32602, -32000
_OTHERS: Final = re.compile(r"[^A-Za-z0-9_-]")  # characters that models do not accept in the name of a tool


class RpcError(Exception):
    """An error of JSON-RPC, by its code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Message(msgspec.Struct, frozen=True):
    """A request; or a notification, which has no id."""

    method: str
    id: str | int | None = None
    params: dict[str, Any] = {}


def parse(body: bytes) -> Message:
    """Parse a message. Raises RpcError."""
    try:
        return msgspec.json.decode(body, type=Message)
    except msgspec.ValidationError as error:
        raise RpcError(INVALID_REQUEST, f"The body is not one message of JSON-RPC: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RpcError(PARSE_ERROR, f"The body is not JSON: {error}") from None


def failure(id_: str | int | None, error: RpcError) -> dict[str, Any]:
    """Return the response for an error."""
    return {"jsonrpc": "2.0", "id": id_, "error": {"code": error.code, "message": str(error)}}


def tool_name(path: str) -> str:
    """Return the name of the tool for a function or a method.

    >>> tool_name("prod/search/predict"), tool_name("counter.add")
    ('prod__search__predict', 'counter_add')
    """
    return _OTHERS.sub("_", path.replace("/", "__"))


def tool(path: str, method: MethodSpec) -> dict[str, Any]:
    """Return the description of a tool."""
    schema = {"type": "object", **method.parameters}
    return {"name": tool_name(path), "description": method.doc, "inputSchema": schema}


def tool_result(value: Any) -> dict[str, Any]:
    """Return the result of a tool: text, and the value itself if it is an object."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    result: dict[str, Any] = {"content": [{"type": "text", "text": text}], "isError": False}
    return result | ({"structuredContent": value} if isinstance(value, dict) else {})


def tool_error(text: str) -> dict[str, Any]:
    """Return the result of a tool that failed, which the model may correct."""
    return {"content": [{"type": "text", "text": text}], "isError": True}
