"""Routes of the console: its live pages, as a snapshot or with `?follow=true` as a stream, and tickets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpufn_core.errors import InvalidInput
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.console.live.function_order import Query, Show, Sort
from gpufn_gateway.console.live.pages import Pages
from gpufn_gateway.console.live.stream import Streams
from gpufn_gateway.console.site import Site
from gpufn_gateway.console.tickets import TICKET_S, Tickets
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.http.sse import EVENT_HEADERS, Events
from gpufn_gateway.openapi.request_bounds import MAX_CONSOLE_OFFSET, MAX_CONSOLE_ROWS
from gpufn_gateway.routes.requests import (
    StreamedResponse,
    flag,
    headers_of,
    json_response,
    number,
    principal_of,
    route,
)

E = TypeVar("E", Show, Sort)


class ConsoleRoutes:
    def __init__(self, pages: Pages, streams: Streams, tickets: Tickets, registry: Registry, site: Site) -> None:
        self._pages = pages
        self._site = site
        self._streams = streams
        self._tickets = tickets
        self._registry = registry

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/console/overview", self.overview, READ, of_functions=True, scans=True),
            route("GET", "/v1/console/functions", self.functions, READ, of_functions=True, scans=True),
            route("GET", "/v1/console/functions/{fn:name}", self.function, READ, of_functions=True),
            route("GET", "/v1/console/nodes", self.nodes, READ),
            route("POST", "/v1/console/ticket", self.ticket),
        ]

    async def overview(self, request: Request) -> ASGIApp:
        principal = principal_of(request)
        return self._respond(request, lambda: self._pages.overview(principal))

    async def functions(self, request: Request) -> ASGIApp:
        principal, query = principal_of(request), _query_in(request)
        return self._respond(request, lambda: self._pages.functions(principal, query))

    async def function(self, request: Request) -> ASGIApp:
        principal = principal_of(request)
        name = self._registry.find(request.path_params["fn"], principal)
        principal.require_on(READ, name)
        return self._respond(request, lambda: self._pages.function(principal, name))

    async def nodes(self, request: Request) -> ASGIApp:
        return self._respond(request, self._pages.nodes)

    async def ticket(self, request: Request) -> Response:
        """Return a ticket, with which `gpufn console` signs in the browser. Raises RouteError without a console."""
        self._site.check_built()
        authorization = headers_of(request).get(b"authorization", b"")
        ticket = await self._tickets.issue(principal_of(request), authorization)
        return json_response({"ticket": ticket, "expires_in_s": TICKET_S}, 201)

    def _respond(self, request: Request, snapshot: Callable[[], Any]) -> ASGIApp:
        if flag(request, "follow"):
            principal = principal_of(request)
            key = (request.url.path, request.url.query, principal.scopes)
            events = self._streams.follow(principal.owner, key, snapshot)
            return StreamedResponse(EVENT_HEADERS, events, Events.heartbeat)
        return json_response(snapshot())


def _query_in(request: Request) -> Query:
    """Raises InvalidInput."""
    return Query(
        search=request.query_params.get("search", "")[:200],
        show=_choice(request, "show", Show.ALL),
        sort=_choice(request, "sort", Sort.NAME),
        offset=int(number(request, "offset", 0, 0, MAX_CONSOLE_OFFSET)),
        limit=int(number(request, "limit", 100, 1, MAX_CONSOLE_ROWS)),
    )


def _choice(request: Request, name: str, default: E) -> E:
    text = request.query_params.get(name, default.value)
    kind = type(default)
    if text not in tuple(kind):
        raise InvalidInput(f"{name} must be one of {', '.join(kind)}; not {text[:40]!r}", field=name)
    return kind(text)
