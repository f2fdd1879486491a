"""Find the web function of a request, check the right to use it, and serve the request."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from gpufn_core.errors import FunctionNotFound, GpufnError, InvalidInput
from gpufn_core.spec.web_spec import PREFIX
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.team_account import quota_id
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.http.body_reader import Receive, Scope, Send
from gpufn_gateway.routes.calls.invoke import Invoke
from gpufn_gateway.web.address import Address, address_of
from gpufn_gateway.web.endpoint import serve_endpoint
from gpufn_gateway.web.headers import NOT_STORED
from gpufn_gateway.web.match import Match
from gpufn_gateway.web.request import serve_request
from gpufn_gateway.web.socket import refuse, serve_socket


class WebApps:
    def __init__(self, calls: Calls, invoke: Invoke) -> None:
        self._calls = calls
        self._invoke = invoke

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an HTTP request whose path begins with PREFIX. Raises GpufnError before the response has started."""
        match = self._match(scope)
        if not match.address.rest:  # without the slash, relative links of a page would leave the application
            await _redirect(scope, send)
        elif match.web.is_app:
            await serve_request(self._calls, match, scope, receive, send)
        else:
            await serve_endpoint(self._invoke, match, scope, receive, send)

    async def serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a WebSocket. An error is its HTTP response, or the code and reason with which it is closed."""
        try:
            match = self._match(scope)
            if not match.web.is_app:
                raise InvalidInput("a web endpoint has no WebSockets: declare an @asgi_app", field="upgrade")
            with self._calls.access.streams.open(self._sender(match)):
                await serve_socket(self._calls, match, scope, receive, send, check=self._check(match, scope))
        except GpufnError as error:
            await refuse(error, send)

    def _sender(self, match: Match) -> str:
        """Return the principal that opens a stream. A visitor of a public function counts for the team that owns it."""
        if match.principal.id:
            return self._calls.access.sender_of(match.principal)
        return quota_id(self._calls.registry.teams.name_of(match.target.name))

    def _check(self, match: Match, scope: Scope) -> Callable[[], None]:
        """Return a check that raises Unauthorized once the sender has other rights: a WebSocket may last for days."""
        if not match.principal.id:
            return lambda: None
        return functools.partial(self._calls.access.check_unchanged, dict(scope["headers"]), match.principal)

    def _match(self, scope: Scope) -> Match:
        """Raises GpufnError."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        address = address_of(scope["path"])
        if address is not None and (public := self._public(address, headers)) is not None:
            return public
        principal = self._calls.access.authenticate(headers, serves_own_pages=True)
        if address is None:
            raise FunctionNotFound(f"Web functions are at {PREFIX}{{env}}/{{app}}/{{function}}/.")
        target = self._calls.registry.resolve(address.name, principal)
        principal.require_invoke(target.name)
        web = target.revision.spec.web
        if web is msgspec.UNSET:
            raise FunctionNotFound(
                f"{target.name} is not a web function: call it at /v1/functions/{target.name}/invoke."
            )
        return Match(address, target, web, principal)

    def _public(self, address: Address, headers: dict[bytes, bytes]) -> Match | None:
        """Return the match of a public function, which everybody may use, with the rights for this function only."""
        name = address.public_name
        function = self._calls.registry.functions.get(name)
        if function is None:
            return None
        web = self._calls.registry.serving(function).spec.web
        if web is msgspec.UNSET or not web.public:
            return None
        self._calls.access.check_address(headers)
        return Match(address, self._calls.registry.target(name, ""), web, Principal("", frozenset({f"invoke:{name}"})))


async def _redirect(scope: Scope, send: Send) -> None:
    query = scope["query_string"]
    location = scope["raw_path"] + b"/" + (b"?" + query if query else b"")
    await send(
        {
            "type": "http.response.start",
            "status": 307,
            "headers": [(b"location", location), (b"content-length", b"0"), *NOT_STORED],
        }
    )
    await send({"type": "http.response.body", "body": b""})
