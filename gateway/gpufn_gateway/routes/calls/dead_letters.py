"""Routes of dead letters: list, show, replay and drop one, or all of a function."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gpufn_core.protocol.limits import DEAD_LETTERS_AT_ONCE
from gpufn_gateway.audit.request_audit import name_object
from gpufn_gateway.auth.scopes import DEPLOY, INVOKE, READ
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.responses import USER_CONTENT
from gpufn_gateway.routes.requests import call_id_in, json_response, number, principal_of, route
from gpufn_gateway.submitted import call_views
from gpufn_gateway.submitted.dead_letters import DeadLetters


class DeadLetterRoutes:
    def __init__(self, letters: DeadLetters, registry: Registry) -> None:
        self._letters = letters
        self._registry = registry

    def routes(self) -> list[Route]:
        one = "/v1/dlq/{fn:name}/{id}"
        return [
            route("GET", "/v1/dlq", self.all, READ, of_functions=True, scans=True),
            route("GET", "/v1/dlq/{fn:name}", self.of_function, READ, of_functions=True, scans=True),
            route("DELETE", "/v1/dlq/{fn:name}", self.drop_all, DEPLOY, of_functions=True),
            route("POST", "/v1/dlq/{fn:name}/replay", self.replay_all),
            route("GET", one, self.show, READ, of_functions=True),
            route("DELETE", one, self.drop, DEPLOY, of_functions=True),
            route("GET", f"{one}/payload", self.payload),
            route("POST", f"{one}/replay", self.replay),
        ]

    async def all(self, request: Request) -> Response:
        return await self._list(request, "*", principal_of(request).may_read)

    async def of_function(self, request: Request) -> Response:
        return await self._list(request, self._name(request, READ), lambda _: True)

    async def _list(self, request: Request, function: str, is_listed: Callable[[str], bool]) -> Response:
        limit = int(number(request, "limit", 20, 1, DEAD_LETTERS_AT_ONCE))
        return json_response({"letters": await self._letters.recent(function, limit, is_listed)})

    async def show(self, request: Request) -> Response:
        letter, _ = await self._letters.read(self._name(request, READ), call_id_in(request))
        return json_response(call_views.letter(letter))

    async def payload(self, request: Request) -> Response:
        letter, payload = await self._letters.read(self._name(request, INVOKE), call_id_in(request))
        headers = {name.decode(): value.decode() for name, value in USER_CONTENT}
        if letter.reference is not None:
            headers["content-length"] = str(letter.size)
            parts = self._letters.payload_parts(letter.reference)
            return StreamingResponse(parts, 200, headers, negotiation.clean(letter.content_type))
        return Response(payload, 200, headers, negotiation.clean(letter.content_type))

    async def replay(self, request: Request) -> Response:
        name = self._name(request, INVOKE)
        record = await self._letters.replay(name, call_id_in(request), principal_of(request))
        links = call_views.links(record.id)
        return json_response({"id": record.id, "state": record.state, "links": links}, 202, {"Location": links["self"]})

    async def replay_all(self, request: Request) -> Response:
        replayed = await self._letters.replay_all(self._name(request, INVOKE), principal_of(request))
        return json_response({"replayed": replayed}, 202)

    async def drop(self, request: Request) -> Response:
        await self._letters.drop(self._name(request, DEPLOY), call_id_in(request))
        return Response(status_code=204)

    async def drop_all(self, request: Request) -> Response:
        return json_response({"dropped": await self._letters.drop_all(self._name(request, DEPLOY))})

    def _name(self, request: Request, verb: str) -> str:
        """Return the full name of the function, which may have been deleted. Raises FunctionNotFound, Forbidden."""
        principal = principal_of(request)
        name = self._registry.find_or_deleted(request.path_params["fn"], principal)
        principal.require_on(verb, name)
        name_object(request.scope, "fn", name)
        return name
