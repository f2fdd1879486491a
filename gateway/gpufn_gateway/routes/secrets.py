"""Routes of secrets: set, list, remove, and rotate the master key. None returns a value."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_gateway.auth.scopes import ADMIN, DEPLOY, READ
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import NewSecret
from gpufn_gateway.routes.requests import json_response, read_json, route
from gpufn_gateway.secrets.secrets import Secrets


class SecretRoutes:
    def __init__(self, secrets: Secrets, bodies: BodyReader) -> None:
        self._secrets = secrets
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/secrets", self.index, READ),
            route("PUT", "/v1/secrets/{name}", self.set, DEPLOY),
            route("DELETE", "/v1/secrets/{name}", self.remove, DEPLOY),
            route("POST", "/v1/secrets/rotate", self.rotate, ADMIN),
        ]

    async def index(self, request: Request) -> Response:
        return json_response({"secrets": await self._secrets.all()})

    async def set(self, request: Request) -> Response:
        body = await read_json(request, NewSecret, self._bodies)
        return json_response(await self._secrets.set(request.path_params["name"], body.value))

    async def remove(self, request: Request) -> Response:
        await self._secrets.remove(request.path_params["name"])
        return Response(status_code=204)

    async def rotate(self, request: Request) -> Response:
        return json_response({"encrypted": await self._secrets.rotate()})
