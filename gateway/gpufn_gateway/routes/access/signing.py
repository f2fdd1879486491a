"""Routes of signing: trusted keys, and environments that require signatures."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_gateway.audit.request_audit import add_details
from gpufn_gateway.auth.scopes import ADMIN, READ
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import NewSigner, RequireSignatures
from gpufn_gateway.routes.requests import json_response, read_json, route
from gpufn_gateway.signing.trusted_keys import TrustedKeys


class SigningRoutes:
    def __init__(self, trusted_keys: TrustedKeys, bodies: BodyReader) -> None:
        self._trusted_keys = trusted_keys
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/signing", self.index, READ),
            route("PUT", "/v1/signing/keys/{name}", self.trust, ADMIN),
            route("DELETE", "/v1/signing/keys/{name}", self.distrust, ADMIN),
            route("PUT", "/v1/signing/required/{env}", self.require, ADMIN),
            route("DELETE", "/v1/signing/required/{env}", self.allow_unsigned, ADMIN),
        ]

    async def index(self, request: Request) -> Response:
        return self._rules()

    async def trust(self, request: Request) -> Response:
        body = await read_json(request, NewSigner, self._bodies)
        add_details(request.scope, patterns=",".join(body.patterns))
        key = await self._trusted_keys.trust(request.path_params["name"], body.public_key, body.patterns)
        add_details(request.scope, key=key.id)
        return json_response(key)

    async def distrust(self, request: Request) -> Response:
        key = await self._trusted_keys.distrust(request.path_params["name"])
        add_details(request.scope, key=key.id)
        return json_response(key)

    async def require(self, request: Request) -> Response:
        body = await read_json(request, RequireSignatures, self._bodies)
        add_details(request.scope, force=body.force)
        await self._trusted_keys.require(request.path_params["env"], force=body.force)
        return self._rules()

    async def allow_unsigned(self, request: Request) -> Response:
        await self._trusted_keys.allow_unsigned(request.path_params["env"])
        return self._rules()

    def _rules(self) -> Response:
        return json_response({"keys": self._trusted_keys.all(), "required": self._trusted_keys.required()})
