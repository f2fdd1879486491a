"""Routes of secrets: set, list, remove, and rotate the master key. None returns a value."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.errors import Forbidden, SecretNotFound
from gpufn_core.spec.naming.patterns import ALL
from gpufn_core.spec.naming.secret_scopes import SecretRef
from gpufn_gateway.audit.request_audit import add_details
from gpufn_gateway.auth.scopes import ADMIN, DEPLOY, READ
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import NewSecret
from gpufn_gateway.routes.requests import json_response, principal_of, read_json, route
from gpufn_gateway.secrets.secrets import Secrets, check_ref, no_such_secret


class SecretRoutes:
    def __init__(self, secrets: Secrets, bodies: BodyReader) -> None:
        self._secrets = secrets
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/secrets", self.index, READ, of_functions=True, scans=True),
            route("PUT", "/v1/secrets/{name}", self.set, DEPLOY, of_functions=True),
            route("DELETE", "/v1/secrets/{name}", self.remove, DEPLOY, of_functions=True),
            route("POST", "/v1/secrets/rotate", self.rotate, ADMIN),
        ]

    async def index(self, request: Request) -> Response:
        """List the secrets for functions that the key may all read."""
        principal = principal_of(request)
        secrets = [each for each in await self._secrets.all() if principal.may_on_all(READ, each.ref.scope)]
        return json_response({"secrets": secrets})

    async def set(self, request: Request) -> Response:
        """Set a secret. Raises SecretNotFound, or Forbidden if the key may only list it."""
        ref = _ref(request)
        if not principal_of(request).may_on_all(READ, ref.scope):
            raise SecretNotFound(
                f"There is no secret {ref.name} that this API key may set for {ref.scope}: name a scope whose "
                "functions the key may all deploy, such as ?scope=prod/search/* (--env prod --app search)."
            )
        _require_deploy(request, ref)
        body = await read_json(request, NewSecret, self._bodies)
        return json_response(await self._secrets.set(ref, body.value))

    async def remove(self, request: Request) -> Response:
        ref = _ref(request)
        if not principal_of(request).may_on_all(READ, ref.scope):
            raise no_such_secret(ref)
        _require_deploy(request, ref)
        await self._secrets.remove(ref)
        return Response(status_code=204)

    async def rotate(self, request: Request) -> Response:
        return json_response({"encrypted": await self._secrets.rotate()})


def _ref(request: Request) -> SecretRef:
    """Return the secret that a request names. Raises InvalidInput."""
    ref = SecretRef(request.path_params["name"], request.query_params.get("scope", ALL))
    check_ref(ref)
    add_details(request.scope, functions=ref.scope)
    return ref


def _require_deploy(request: Request, ref: SecretRef) -> None:
    if not principal_of(request).may_on_all(DEPLOY, ref.scope):
        raise Forbidden(f"This request needs an API key with the scope '{DEPLOY}:{ref.scope}'.")
