"""Routes of artifacts: upload the files and samples of models to the object store."""

from __future__ import annotations

import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_gateway.auth.scopes import DEPLOY
from gpufn_gateway.builds.artifacts import Artifacts
from gpufn_gateway.http.body_reader import iter_body, require_content_length
from gpufn_gateway.routes.requests import digest_in, headers_of, json_response, route


class ArtifactRoutes:
    """Artifact routes. `limit_bytes` is the largest file."""

    def __init__(self, artifacts: Artifacts, limit_bytes: int) -> None:
        self._artifacts = artifacts
        self._limit_bytes = limit_bytes

    def routes(self) -> list[Route]:
        return [
            route("HEAD", "/v1/artifacts/{digest}", self.has, DEPLOY, of_functions=True),
            route("PUT", "/v1/artifacts/{digest}", self.put, DEPLOY, of_functions=True),
        ]

    async def has(self, request: Request) -> Response:
        exists = await self._artifacts.has(digest_in(request, "a file"))
        return Response(status_code=200 if exists else 404)

    async def put(self, request: Request) -> Response:
        digest = digest_in(request, "a file")
        size = require_content_length(headers_of(request), self._limit_bytes, "a model's file")
        async with contextlib.aclosing(iter_body(request.receive)) as parts:
            await self._artifacts.put(digest, size, parts)
        return json_response({"artifact": digest, "size": size}, 201)
