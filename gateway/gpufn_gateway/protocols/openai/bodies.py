"""Requests as keyword arguments, and results as OpenAI's objects."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Set
from typing import Any, Final

import msgspec

from gpufn_core.errors import FunctionRaised, InvalidInput
from gpufn_gateway.arguments.json_body import decode_json
from gpufn_gateway.protocols.multipart import FormParts

# Fields of a request that are for the gateway, not for the function.
_OWN: Final = frozenset({"model", "stream", "stream_options", "encoding_format"})
RESPONSES_OWN: Final = _OWN | {"store", "metadata"}
IMAGES_OWN: Final = _OWN | {"response_format"}
COMPLETION_ID: Final = "chatcmpl-gpufn"
_FORM_OWN: Final = frozenset({"model", "stream", "response_format", "include[]", "timestamp_granularities[]"})


def parse(body: bytes) -> dict[str, Any]:
    """Parse a request. Raises InvalidInput."""
    fields = decode_json(body, object)
    if not isinstance(fields, dict):
        raise InvalidInput("the body is a JSON object")
    return check(fields)


def check(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request. Raises InvalidInput for the gateway's own fields."""
    model, stream = fields.get("model"), fields.get("stream")
    if not isinstance(model, str):
        raise InvalidInput("model must be the name of a function", field="model")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidInput("stream must be true or false", field="stream")
    if fields.get("encoding_format", "float") not in ("float", "base64"):
        raise InvalidInput("encoding_format must be float or base64", field="encoding_format")
    return fields


def arguments(fields: dict[str, Any], own: Set[str] = _OWN) -> bytes:
    """Return the fields that are not the gateway's `own` as keyword arguments."""
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in own})


def message(result: Any) -> str:
    """Return the text of a chat result: a string, or the strings of a generator. Raises FunctionRaised."""
    if isinstance(result, str):
        return result
    if isinstance(result, list) and all(isinstance(item, str) for item in result):
        return "".join(result)
    raise FunctionRaised("A function that serves chat or transcriptions must return or yield strings.")


def transcription_arguments(form: FormParts, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a form as keyword arguments, with the file as `file`. Text becomes a number where the schema
    has one. `filename` is passed to functions that accept it. Raises InvalidInput."""
    upload = form.file("file")
    properties: Mapping[str, Any] = parameters.get("properties", {})
    given: dict[str, Any] = {"file": base64.b64encode(upload.data).decode()}
    if "filename" in properties:
        given["filename"] = upload.name
    for name, values in form.fields.items():
        if name not in _FORM_OWN:
            given[name] = _number(name, values[0]) if _is_number(properties.get(name, {})) else values[0]
    return given


def _is_number(schema: Mapping[str, Any]) -> bool:
    members = (schema, *schema.get("anyOf", ()))
    return any(member.get("type") in ("number", "integer") for member in members)


def _number(name: str, text: str) -> float:
    try:
        return msgspec.json.decode(text, type=float)
    except msgspec.DecodeError:
        raise InvalidInput(f"{name} must be a number", field=name) from None


def images(result: Any) -> list[dict[str, str]]:
    """Return the images of a result: bytes, or a list of them, which are base64 in JSON. Raises FunctionRaised."""
    found = result if isinstance(result, list) else [result]
    if not found or not all(isinstance(image, str) for image in found):
        raise FunctionRaised("The function serves openai-images, so it must return the bytes of an image, or a list.")
    return [{"b64_json": image} for image in found]


def completion(text: str, model: str) -> dict[str, Any]:
    """Return a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": COMPLETION_ID, "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}


def embedding_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a request for embeddings with a list of texts."""
    return {**fields, "input": [fields["input"]]} if isinstance(fields.get("input"), str) else fields


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
