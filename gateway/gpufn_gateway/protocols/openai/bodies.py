"""Requests as keyword arguments, and results as OpenAI's objects. Pure."""

from __future__ import annotations

import base64
import struct
from typing import Any, Final

import msgspec

from gpufn_core.encoding.msgspec_errors import describe_json_error
from gpufn_core.errors import FunctionRaised, InvalidInput

# Fields of a request that are for the gateway, not for the function.
_OWN: Final = frozenset({"model", "stream", "stream_options", "encoding_format"})


def parse(body: bytes) -> dict[str, Any]:
    """Parse a request. Raises InvalidInput."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not valid JSON: {describe_json_error(error, body)}") from None
    if not isinstance(fields, dict):
        raise InvalidInput("the body is a JSON object")
    model, stream = fields.get("model"), fields.get("stream")
    if not isinstance(model, str):
        raise InvalidInput("model must be the name of a function", field="model")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidInput("stream must be true or false", field="stream")
    if fields.get("encoding_format", "float") not in ("float", "base64"):
        raise InvalidInput("encoding_format must be float or base64", field="encoding_format")
    return fields


def arguments(fields: dict[str, Any]) -> bytes:
    """Return all other fields as keyword arguments."""
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in _OWN})


def message(result: Any) -> str:
    """Return the text of a chat result: a string, or the strings of a generator. Raises FunctionRaised."""
    if isinstance(result, str):
        return result
    if isinstance(result, list) and all(isinstance(item, str) for item in result):
        return "".join(result)
    raise FunctionRaised("The function serves openai-chat, so it must return or yield strings.")


def embeddings(result: Any, model: str, *, is_base64: bool) -> dict[str, Any]:
    """Return the vectors of an embeddings result. Raises FunctionRaised."""
    try:
        vectors = msgspec.convert(result, list[list[float]])
    except msgspec.ValidationError:
        raise FunctionRaised("The function serves openai-embeddings, so it must return a list of vectors.") from None
    return {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _packed(vector) if is_base64 else vector}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": 0, "total_tokens": 0},  # gpufn does not count tokens
    }


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
