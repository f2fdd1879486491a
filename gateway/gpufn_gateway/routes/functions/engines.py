"""Routes of engines and models: list them with their users, and remove unused engines."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_gateway.auth.scopes import DEPLOY, READ
from gpufn_gateway.builds.engines import Engines, engine_view
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import Collect
from gpufn_gateway.routes.requests import json_response, principal_of, read_json, route


class EngineRoutes:
    def __init__(self, engines: Engines, bodies: BodyReader) -> None:
        self._engines = engines
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/engines", self.index, READ, of_functions=True, scans=True),
            route("POST", "/v1/engines/gc", self.collect, DEPLOY),
            route("GET", "/v1/models", self.models, READ, of_functions=True, scans=True),
            route("GET", "/v1/models/{model:name}", self.model, READ, of_functions=True),
        ]

    async def index(self, request: Request) -> Response:
        return json_response({"engines": self._engines.views(principal_of(request))})

    async def collect(self, request: Request) -> Response:
        body = await read_json(request, Collect, self._bodies)
        garbage = await self._engines.collect(dry_run=body.dry_run)
        return json_response(
            {
                "engines": [engine_view(manifest) for manifest in garbage.engines],
                "files": len(garbage.files),
                "bytes": garbage.freed_bytes,
                "dry_run": body.dry_run,
            }
        )

    async def models(self, request: Request) -> Response:
        return json_response({"models": self._engines.models(principal_of(request))})

    async def model(self, request: Request) -> Response:
        return json_response(self._engines.model(request.path_params["model"], principal_of(request)))
