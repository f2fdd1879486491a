"""Routes of logins: the OpenID provider, tokens, the principal of a request, and the users."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_gateway.audit.request_audit import add_details
from gpufn_gateway.auth.access import AUTH_PATH, EXCHANGE_PATH, Access
from gpufn_gateway.auth.login import Issued, Login
from gpufn_gateway.auth.scopes import ADMIN
from gpufn_gateway.auth.token_store import TokenStore
from gpufn_gateway.auth.tokens import PREFIX
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import TokenRequest
from gpufn_gateway.routes.requests import headers_of, json_response, principal_of, read_json, route


class LoginRoutes:
    def __init__(self, login: Login, access: Access, store: TokenStore, bodies: BodyReader) -> None:
        self._login = login
        self._access = access
        self._store = store
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            route("GET", AUTH_PATH, self.provider),
            route("POST", EXCHANGE_PATH, self.issue),
            route("GET", "/v1/auth/me", self.who),
            route("DELETE", "/v1/auth/tokens", self.revoke_all, ADMIN),
            route("GET", "/v1/users", self.users, ADMIN),
            route("DELETE", "/v1/users/{id}/tokens", self.revoke, ADMIN),
        ]

    async def provider(self, request: Request) -> Response:
        """Show the provider that `gpufn login` uses. Open: a client that logs in has no credential yet."""
        return json_response({"provider": self._login.provider})

    async def issue(self, request: Request) -> Response:
        """Exchange a JSON Web Token, or the API key or token of the request, for a token."""
        body = await read_json(request, TokenRequest, self._bodies)
        headers = headers_of(request)
        if body.jwt:
            issued = await self._login.exchange_jwt(body.jwt, body.scopes, body.expires_in_s)
        else:
            issued = await self._login.exchange(headers, body.scopes, body.expires_in_s)
        self._record(request, issued)
        return json_response(issued, 201)

    def _record(self, request: Request, issued: Issued) -> None:
        request.scope["gpufn.principal"] = self._access.tokens.authenticate(issued.token.encode())
        add_details(request.scope, scopes=",".join(issued.scopes), expires_at=issued.expires_at)

    async def who(self, request: Request) -> Response:
        """Show the principal of this request."""
        principal = principal_of(request)
        credential = headers_of(request).get(b"authorization", b"").partition(b" ")[2].strip()
        expires_at = None
        if principal.id and credential.startswith(PREFIX):
            expires_at = self._access.tokens.decode(credential).expires_at
        elif principal.id:
            expires_at = self._access.expiry_of(principal.id)
        return json_response(
            {
                "id": principal.id,
                "name": self._access.label_of(principal.id),
                "scopes": sorted(principal.scopes),
                "expires_at": expires_at,
                "limits": principal.limits,
            }
        )

    async def users(self, request: Request) -> Response:
        users = sorted(self._access.tokens.users.values(), key=lambda user: user.name)
        return json_response({"users": [msgspec.structs.asdict(user) for user in users]})

    async def revoke(self, request: Request) -> Response:
        """Reject the tokens of a user that were issued until now."""
        await self._store.revoke(request.path_params["id"])
        return Response(status_code=204)

    async def revoke_all(self, request: Request) -> Response:
        """Reject all tokens that were issued until now."""
        await self._store.revoke_all()
        return Response(status_code=204)
