"""Routes of submitted invocations: submit, show, follow, read the result, cancel, list."""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gpufn_core.errors import InvalidInput
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.http.sse import EVENT_HEADERS, Events
from gpufn_gateway.openapi.request_bounds import CURSOR, MAX_LISTED
from gpufn_gateway.routes.requests import (
    StreamedResponse,
    call_id_in,
    headers_of,
    json_response,
    number,
    principal_of,
    route,
    state_in,
    wait_seconds,
    whole_number,
)
from gpufn_gateway.submitted.submit import Search, Submissions
from gpufn_platform.queue.records.call_records import CallCursor


class InvocationRoutes:
    def __init__(self, submissions: Submissions, registry: Registry) -> None:
        self._submissions = submissions
        self._registry = registry

    def routes(self) -> list[Route]:
        one = "/v1/invocations/{id}"
        return [
            route("PUT", "/v1/functions/{fn:name}/invocations/{id}", self.submit),
            route("GET", one, self.show),
            route("DELETE", one, self.cancel),
            route("GET", f"{one}/result", self.result),
            route("GET", f"{one}/events", self.events),
            route("GET", "/v1/calls", self.calls, READ, of_functions=True, scans=True),
        ]

    async def submit(self, request: Request) -> ASGIApp:
        name, invocation, headers = request.path_params["fn"], call_id_in(request), headers_of(request)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            query: bytes = scope["query_string"]
            await self._submissions.submit(name, headers, receive, send, invocation=invocation, query=query)

        return respond

    async def show(self, request: Request) -> Response:
        return json_response(await self._submissions.status(call_id_in(request), principal_of(request)))

    async def cancel(self, request: Request) -> Response:
        record, cancelled = await self._submissions.cancel(call_id_in(request), principal_of(request))
        view = await self._submissions.view(record, principal_of(request))
        return json_response({**view, "cancelled": cancelled})

    async def result(self, request: Request) -> ASGIApp:
        wait_s = wait_seconds(request)
        record, body = await self._submissions.result(call_id_in(request), principal_of(request), wait_s)
        if not record.state.ended:
            return json_response(await self._submissions.view(record, principal_of(request)), 202)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            await self._submissions.send_outcome(record, body, send, is_head=scope["method"] == "HEAD")

        return respond

    async def events(self, request: Request) -> ASGIApp:
        last_seen = whole_number(request.headers.get("last-event-id", ""), 9)
        events = await self._submissions.events(
            call_id_in(request), principal_of(request), -1 if last_seen is None else last_seen
        )
        if events is None:
            return Response(status_code=204)  # EventSource does not reconnect
        return StreamedResponse(EVENT_HEADERS, events, Events.heartbeat)

    async def calls(self, request: Request) -> Response:
        name = request.query_params.get("function")
        function = "*" if name is None else self._registry.find_or_deleted(name, principal_of(request))
        return await list_calls(request, self._submissions, function)


async def list_calls(request: Request, submissions: Submissions, function: str) -> Response:
    """List the submitted calls of `function` (``*``: of all that the client may read), filtered by the query."""
    limit = int(number(request, "limit", 20, 1, MAX_LISTED))
    since = number(request, "since", 0.0, 0.0, math.inf)
    until = number(request, "until", math.inf, 0.0, math.inf)
    params = request.query_params
    wanted = Search(
        function,
        limit,
        state_in(request),
        since,
        until,
        params.get("key"),
        params.get("parent"),
        _cursor(params.get("before")),
    )
    calls, following = await submissions.search(wanted, principal_of(request))
    return json_response(
        {"calls": calls, "next": None if following is None else f"{following.results}.{following.queued}"}
    )


def _cursor(text: str | None) -> CallCursor | None:
    """Parse the `next` of an earlier page. Raises InvalidInput."""
    if text is None:
        return None
    if (match := CURSOR.fullmatch(text)) is None:
        raise InvalidInput(f"before must be the `next` of a page of calls, not {text[:40]!r}", field="before")
    return CallCursor(int(match[1]), int(match[2]))
