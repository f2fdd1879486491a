"""OpenAI's paths: chat completions, embeddings and models, at `/openai/v1` and, except for models, at `/v1`."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpufn_core.errors import FunctionNotFound
from gpufn_core.spec.function_spec import Serves
from gpufn_core.spec.names import shown
from gpufn_gateway.http.sse import Events
from gpufn_gateway.problems import Problem
from gpufn_gateway.protocols.adapter import Adapter, JsonErrors
from gpufn_gateway.protocols.openai import bodies
from gpufn_gateway.protocols.platform import json_of
from gpufn_gateway.routes.requests import json_response, route

_PREFIX: Final = "/openai/v1"
_CHAT: Final = "/chat/completions"
_EMBEDDINGS: Final = "/embeddings"
_SHARED: Final = (f"/v1{_CHAT}", f"/v1{_EMBEDDINGS}")
_ID: Final = "chatcmpl-gpufn"
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def _error(problem: Problem) -> dict[str, Any]:
    info = problem.info
    kind = _TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    code = "model_not_found" if info.code == FunctionNotFound.code else info.code
    return {"error": {"message": info.message, "type": kind, "param": info.field, "code": code}}


class _OpenAIErrors(JsonErrors):
    """Errors as OpenAI's error objects. Arguments that do not fit are a 400."""

    statuses: ClassVar = {422: 400}

    def body(self, problem: Problem) -> object:
        return _error(problem)


class _Chunks:
    """A stream of chat completion chunks: one per item of the generator."""

    content_type = Events.content_type
    heartbeat = Events.heartbeat

    def __init__(self, model: str) -> None:
        self._model = model

    def item(self, number: int, content_type: str, body: bytes) -> bytes:
        return self._chunk({"role": "assistant", "content": bodies.message(msgspec.json.decode(body))}, None)

    def end(self, items: int) -> bytes:
        return self._chunk({}, "stop") + b"data: [DONE]\n\n"

    def error(self, problem: Problem) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode(_error(problem))

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        fields = {"id": _ID, "object": "chat.completion.chunk", "created": 0, "model": self._model, "choices": [choice]}
        return b"data: %b\n\n" % msgspec.json.encode(fields)


class OpenAI(Adapter):
    errors = _OpenAIErrors()

    def owns(self, path: str) -> bool:
        return path.startswith(f"{_PREFIX}/") or path in _SHARED

    def routes(self) -> list[Route]:
        return [
            route("GET", f"{_PREFIX}/models", self.models),
            *(route("POST", f"{prefix}{_CHAT}", self.chat) for prefix in (_PREFIX, "/v1")),
            *(route("POST", f"{prefix}{_EMBEDDINGS}", self.embeddings) for prefix in (_PREFIX, "/v1")),
        ]

    async def models(self, request: Request) -> Response:
        names = [target.path for target in self.platform.functions(request) if target.revision.spec.serves]
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "gpufn"} for name in names]
        return json_response({"object": "list", "data": data})

    async def chat(self, request: Request) -> ASGIApp:
        fields = bodies.parse(await self.platform.body(request))
        model, arguments = self._named(fields["model"], Serves.OPENAI_CHAT, request), bodies.arguments(fields)
        if fields.get("stream"):
            return await self.platform.stream(model, arguments, request, _Chunks(model))
        outcome = await self.platform.invoke(model, arguments, request)
        text = bodies.message(msgspec.json.decode(json_of(outcome)))
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return json_response(
            {"id": _ID, "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
        )

    async def embeddings(self, request: Request) -> Response:
        fields = bodies.parse(await self.platform.body(request))
        model = self._named(fields["model"], Serves.OPENAI_EMBEDDINGS, request)
        if isinstance(fields.get("input"), str):
            fields["input"] = [fields["input"]]
        outcome = await self.platform.invoke(model, bodies.arguments(fields), request)
        result = msgspec.json.decode(json_of(outcome))
        is_base64 = fields.get("encoding_format") == "base64"
        return json_response(bodies.embeddings(result, model, is_base64=is_base64))

    def _named(self, model: str, serves: Serves, request: Request) -> str:
        """Return the model if its function serves this API. Raises FunctionNotFound, Forbidden."""
        target = self.platform.resolve(model, request)
        if target.revision.spec.serves is not serves:
            raise FunctionNotFound(f"{shown(model)} does not declare serves={serves.value!r}.")
        return model
