"""OpenAI's paths, at `/openai/v1`. Chat completions and embeddings are also at `/v1`."""

from __future__ import annotations

import time
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpufn_core.errors import FunctionNotFound, InvalidInput
from gpufn_core.spec.function_spec import Serves
from gpufn_core.spec.naming.names import shown
from gpufn_gateway.protocols.adapter import Adapter
from gpufn_gateway.protocols.openai import bodies, responses
from gpufn_gateway.protocols.openai.batches import BatchRoutes
from gpufn_gateway.protocols.openai.errors import OpenAIErrors
from gpufn_gateway.protocols.openai.files import FileRoutes
from gpufn_gateway.protocols.openai.models import named
from gpufn_gateway.protocols.openai.streams import ChatChunks, TranscriptEvents
from gpufn_gateway.protocols.platform import Platform, json_of
from gpufn_gateway.routes.requests import json_response, route

_PREFIX: Final = "/openai/v1"
_CHAT: Final = "/chat/completions"
_EMBEDDINGS: Final = "/embeddings"
_SHARED: Final = (f"/v1{_CHAT}", f"/v1{_EMBEDDINGS}")
_TRANSCRIPTS: Final = ("json", "text")  # forms of a transcription


class OpenAI(Adapter):
    errors = OpenAIErrors()
    audited = frozenset({f"{_PREFIX}/files", f"{_PREFIX}/files/{{id}}"})  # uploads

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        self._files = FileRoutes(platform, _PREFIX)
        self._batches = BatchRoutes(platform, self._files, _PREFIX)

    def owns(self, path: str) -> bool:
        return path.startswith(f"{_PREFIX}/") or path in _SHARED

    def routes(self) -> list[Route]:
        return [
            route("GET", f"{_PREFIX}/models", self.models, scans=True),
            route("GET", f"{_PREFIX}/models/{{model:path}}", self.model),
            *(route("POST", f"{prefix}{_CHAT}", self.chat) for prefix in (_PREFIX, "/v1")),
            *(route("POST", f"{prefix}{_EMBEDDINGS}", self.embeddings) for prefix in (_PREFIX, "/v1")),
            route("POST", f"{_PREFIX}/responses", self.responses),
            route("POST", f"{_PREFIX}/audio/transcriptions", self.transcriptions),
            route("POST", f"{_PREFIX}/images/generations", self.images),
            *self._files.routes(),
            *self._batches.routes(),
        ]

    # --- models ------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        names = [target.path for target in self.platform.functions(request) if target.revision.spec.serves]
        return json_response({"object": "list", "data": [_model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        target = self.platform.resolve(request.path_params["model"], request)
        if not target.revision.spec.serves:
            raise FunctionNotFound(f"{shown(target.path)} does not declare serves=...")
        return json_response(_model(target.path))

    # --- calls -------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> ASGIApp:
        fields = bodies.parse(await self.platform.body(request))
        model = named(self.platform, fields["model"], Serves.OPENAI_CHAT, request).path
        if fields.get("stream"):
            return await self.platform.stream(model, bodies.arguments(fields), request, ChatChunks(fields["model"]))
        text = await self._text(model, bodies.arguments(fields), request)
        return json_response(bodies.completion(text, fields["model"]))

    async def responses(self, request: Request) -> ASGIApp:
        fields = bodies.parse(await self.platform.body(request))
        model = named(self.platform, fields["model"], Serves.OPENAI_CHAT, request).path
        arguments = bodies.arguments(responses.messages(fields), bodies.RESPONSES_OWN)
        if fields.get("stream"):
            return await self.platform.stream(model, arguments, request, responses.ResponseEvents(fields))
        return json_response(responses.response(fields, await self._text(model, arguments, request)))

    async def embeddings(self, request: Request) -> Response:
        fields = bodies.embedding_fields(bodies.parse(await self.platform.body(request)))
        model = named(self.platform, fields["model"], Serves.OPENAI_EMBEDDINGS, request).path
        outcome = await self.platform.invoke(model, bodies.arguments(fields), request)
        result = msgspec.json.decode(json_of(outcome))
        is_base64 = fields.get("encoding_format") == "base64"
        return json_response(bodies.embeddings(result, fields["model"], is_base64=is_base64))

    async def transcriptions(self, request: Request) -> ASGIApp:
        form = await self.platform.form(request)
        target = named(self.platform, form.text("model"), Serves.OPENAI_TRANSCRIPTIONS, request)
        response_format = form.text("response_format", _TRANSCRIPTS[0])
        if response_format not in _TRANSCRIPTS:
            raise InvalidInput(f"response_format must be {' or '.join(_TRANSCRIPTS)}", field="response_format")
        arguments = msgspec.json.encode(bodies.transcription_arguments(form, target.method.parameters))
        if form.text("stream") == "true":
            return await self.platform.stream(target.path, arguments, request, TranscriptEvents())
        text = await self._text(target.path, arguments, request)
        if response_format == "text":
            return Response(f"{text}\n", media_type="text/plain")
        return json_response({"text": text})

    async def images(self, request: Request) -> Response:
        fields = bodies.parse(await self.platform.body(request))
        if fields.get("response_format", "b64_json") != "b64_json":
            raise InvalidInput("response_format must be b64_json: gpufn keeps no images", field="response_format")
        model = named(self.platform, fields["model"], Serves.OPENAI_IMAGES, request).path
        outcome = await self.platform.invoke(model, bodies.arguments(fields, bodies.IMAGES_OWN), request)
        data = bodies.images(msgspec.json.decode(json_of(outcome)))
        return json_response({"created": int(time.time()), "data": data})

    async def _text(self, model: str, arguments: bytes, request: Request) -> str:
        outcome = await self.platform.invoke(model, arguments, request)
        return bodies.message(msgspec.json.decode(json_of(outcome)))


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "gpufn"}
