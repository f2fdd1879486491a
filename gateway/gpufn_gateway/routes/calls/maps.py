"""Routes of maps: send items, show progress, follow outcomes, cancel, list."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.errors import InvalidInput
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.maps import outcomes
from gpufn_gateway.maps.maps import Maps
from gpufn_gateway.maps.outcomes import Cursor
from gpufn_gateway.openapi.request_bounds import MAX_INDEX_DIGITS, MAX_LISTED, MAX_SEQUENCE_DIGITS
from gpufn_gateway.routes.requests import (
    StreamedResponse,
    call_id_in,
    flag,
    headers_of,
    json_response,
    number,
    principal_of,
    route,
    state_in,
    whole_number,
)


class MapRoutes:
    def __init__(self, maps: Maps, registry: Registry) -> None:
        self._maps = maps
        self._registry = registry

    def routes(self) -> list[Route]:
        one = "/v1/maps/{id}"
        return [
            route("PUT", "/v1/functions/{fn:name}/maps/{id}/items/{first}", self.accept),
            route("GET", "/v1/maps", self.index, READ, of_functions=True, scans=True),
            route("GET", one, self.show, scans=True),
            route("DELETE", one, self.cancel),
            route("GET", f"{one}/outcomes", self.outcomes),
            route("GET", f"{one}/items", self.items, scans=True),
        ]

    async def accept(self, request: Request) -> Response:
        params = request.path_params
        text = params["first"]
        first = whole_number(text, MAX_INDEX_DIGITS)
        if first is None:
            raise InvalidInput(f"the index of the first item must be 0 or more, not {text[:40]!r}", field="first")
        is_last = flag(request, "last")
        headers = headers_of(request)
        view, limits = await self._maps.accept(
            params["fn"], call_id_in(request), first, headers, request.receive, is_last=is_last
        )
        limit_headers = {name.decode(): value.decode() for name, value in limits}
        return json_response(view, 202, {"Location": f"/v1/maps/{view['id']}", **limit_headers})

    async def show(self, request: Request) -> Response:
        return json_response(await self._maps.status(call_id_in(request), principal_of(request)))

    async def cancel(self, request: Request) -> Response:
        status, cancelled = await self._maps.cancel(call_id_in(request), principal_of(request))
        return json_response({**status, "cancelled": cancelled})

    async def outcomes(self, request: Request) -> StreamedResponse:
        after = Cursor.read(request.query_params.get("after"))
        encoding = outcomes.encoding_for(request.headers.get("accept", ""))
        outcomes_ = await self._maps.outcomes(call_id_in(request), principal_of(request), after, encoding)
        headers = [(b"content-type", encoding.content_type.encode())]
        return StreamedResponse(headers, outcomes_, encoding.heartbeat)

    async def items(self, request: Request) -> Response:
        limit = int(number(request, "limit", 100, 1, MAX_LISTED))
        text, state = request.query_params.get("before"), state_in(request)
        before = None if text is None else whole_number(text, MAX_SEQUENCE_DIGITS)
        if text is not None and before is None:
            raise InvalidInput(f"before must be the `next` of a page of items, not {text[:40]!r}", field="before")
        items, following = await self._maps.items(call_id_in(request), principal_of(request), limit, state, before)
        return json_response({"items": items, "next": None if following is None else str(following)})

    async def index(self, request: Request) -> Response:
        name = request.query_params.get("function")
        limit = int(number(request, "limit", 20, 1, MAX_LISTED))
        principal = principal_of(request)
        function = "*" if name is None else self._registry.find_or_deleted(name, principal)
        maps = await self._maps.recent(function, limit, principal.may_read)
        return json_response({"maps": maps})
