"""Routes of webhook secrets, which receivers use to verify signatures."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.protocol.records import Webhook
from gpufn_gateway.auth.access import Access
from gpufn_gateway.auth.scopes import ADMIN
from gpufn_gateway.routes.requests import json_response, no_such_key, principal_of, route
from gpufn_gateway.webhooks.secrets import WebhookSecrets


class WebhookRoutes:
    def __init__(self, secrets: WebhookSecrets, access: Access) -> None:
        self._secrets = secrets
        self._access = access

    def routes(self) -> list[Route]:
        one = "/v1/keys/{id}/webhook-secret"
        return [route("GET", one, self.show), route("POST", one, self.change)]

    async def show(self, request: Request) -> Response:
        return json_response({"secret": (await self._secrets.of(self._owner(request)))[0]})

    async def change(self, request: Request) -> Response:
        return json_response({"secret": (await self._secrets.change(self._owner(request)))[0]}, 201)

    def _owner(self, request: Request) -> str:
        """Return the owner in the path. Only admins may access secrets other than their own."""
        principal, owner = principal_of(request), request.path_params["id"]
        if owner != principal.id:
            principal.require(ADMIN)
        if owner != Webhook.PLATFORM and not self._access.knows(owner):
            raise no_such_key(owner)
        return str(owner)
