"""Routes of submitted invocations: submit, show, follow, read the result, cancel, list."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import CallRecord
from gpufn_core.protocol.subjects import is_function_name
from gpufn_core.spec.function_spec import function_name
from gpufn_gateway.auth.access import READ
from gpufn_gateway.http.sse import EVENT_HEADERS, Events, pump
from gpufn_gateway.openapi.request_bounds import MAX_LISTED
from gpufn_gateway.routes.requests import (
    call_id_in,
    headers_of,
    json_response,
    number,
    principal_of,
    wait_seconds,
    whole_number,
)
from gpufn_gateway.submitted.submit import Submissions


class InvocationRoutes:
    def __init__(self, submissions: Submissions) -> None:
        self._submissions = submissions

    def routes(self) -> list[Route]:
        one = "/v1/invocations/{id}"
        return [
            Route("/v1/functions/{fn}/invocations/{id}", self.submit, methods=["PUT"]),
            Route(one, self.show, methods=["GET"]),
            Route(one, self.cancel, methods=["DELETE"]),
            Route(f"{one}/result", self.result, methods=["GET"]),
            Route(f"{one}/events", self.events, methods=["GET"]),
            Route("/v1/calls", self.calls, methods=["GET"]),
        ]

    async def submit(self, request: Request) -> _Submit:
        return _Submit(self._submissions, request)

    async def show(self, request: Request) -> Response:
        return json_response(await self._submissions.status(call_id_in(request), principal_of(request)))

    async def cancel(self, request: Request) -> Response:
        record, cancelled = await self._submissions.cancel(call_id_in(request), principal_of(request))
        return json_response({**await self._submissions.view(record), "cancelled": cancelled})

    async def result(self, request: Request) -> Response | _Result:
        wait_s = wait_seconds(request)
        record, body = await self._submissions.result(call_id_in(request), principal_of(request), wait_s)
        if record.state.ended:
            return _Result(self._submissions, record, body)
        return json_response(await self._submissions.view(record), 202)

    async def events(self, request: Request) -> Response | _Events:
        last_seen = whole_number(request.headers.get("last-event-id", ""), 9)
        events = await self._submissions.events(
            call_id_in(request), principal_of(request), -1 if last_seen is None else last_seen
        )
        return Response(status_code=204) if events is None else _Events(events)  # 204: EventSource does not reconnect

    async def calls(self, request: Request) -> Response:
        principal_of(request).require(READ)
        name = request.query_params.get("function")
        return await list_calls(request, self._submissions, "*" if name is None else check_function_name(name))


class _Submit:
    def __init__(self, submissions: Submissions, request: Request) -> None:
        self._submissions = submissions
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, invocation = self._request.path_params["fn"], call_id_in(self._request)
        query: bytes = scope["query_string"]
        headers = headers_of(self._request)
        await self._submissions.submit(name, headers, receive, send, invocation=invocation, query=query)


class _Result:
    def __init__(self, submissions: Submissions, record: CallRecord, body: bytes) -> None:
        self._submissions = submissions
        self._record = record
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["method"] == "HEAD"
        await self._submissions.send_outcome(self._record, self._body, send, is_head=is_head)


class _Events:
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["method"] == "HEAD"
        await pump(receive, send, EVENT_HEADERS, self._events, heartbeat=Events.heartbeat, is_head=is_head)


async def list_calls(request: Request, submissions: Submissions, function: str) -> Response:
    """List the submitted calls of `function` (``*`` for all), filtered by the query."""
    limit = int(number(request, "limit", 20, 1, MAX_LISTED))
    since = number(request, "since", 0.0, 0.0, math.inf)
    text = request.query_params.get("state")
    if text is not None and text not in tuple(InvocationState):
        raise InvalidInput(f"state must be one of {', '.join(InvocationState)}; not {text[:40]!r}", field="state")
    state = None if text is None else InvocationState(text)
    return json_response({"calls": await submissions.recent(function, limit, state, since)})


def check_function_name(name: str) -> str:
    """Return the normalized name of a function, which may have been deleted. Raises InvalidInput."""
    normalized = function_name(name)
    if not is_function_name(normalized):
        raise InvalidInput(f"{name[:80]!r} is not a valid function name", field="function")
    return normalized
