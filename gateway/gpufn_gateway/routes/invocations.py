"""Submitted invocations: queue one, see how it is, follow it, fetch its result, cancel it, list them."""

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
from gpufn_gateway.openapi.request_bounds import MOST_LISTED
from gpufn_gateway.routes.requests import (
    call_id_in,
    headers_of,
    json_answer,
    number,
    principal_of,
    seconds_to_wait,
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
        return json_answer(await self._submissions.status(call_id_in(request), principal_of(request)))

    async def cancel(self, request: Request) -> Response:
        record, cancelled = await self._submissions.cancel(call_id_in(request), principal_of(request))
        return json_answer({**await self._submissions.view(record), "cancelled": cancelled})

    async def result(self, request: Request) -> Response | _Result:
        wait_s = seconds_to_wait(request)
        record, body = await self._submissions.result(call_id_in(request), principal_of(request), wait_s)
        if record.state.ended:
            return _Result(self._submissions, record, body)
        return json_answer(await self._submissions.view(record), 202)

    async def events(self, request: Request) -> Response | _Events:
        seen = whole_number(request.headers.get("last-event-id", ""), 9)
        events = await self._submissions.events(
            call_id_in(request), principal_of(request), -1 if seen is None else seen
        )
        return Response(status_code=204) if events is None else _Events(events)  # 204: do not come again

    async def calls(self, request: Request) -> Response:
        principal_of(request).need(READ)
        name = request.query_params.get("function")
        return await list_calls(request, self._submissions, "*" if name is None else deployed_name(name))


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
    """The submitted calls of `function` (``*``: of all) that the query asks for."""
    limit = int(number(request, "limit", 20, 1, MOST_LISTED))
    since = number(request, "since", 0.0, 0.0, math.inf)
    text = request.query_params.get("state")
    if text is not None and text not in tuple(InvocationState):
        raise InvalidInput(f"state is {', '.join(InvocationState)}; not {text[:40]!r}", field="state")
    state = None if text is None else InvocationState(text)
    return json_answer({"calls": await submissions.recent(function, limit, state, since)})


def deployed_name(name: str) -> str:
    """Also of a function that was deleted: its calls are kept. Raises InvalidInput."""
    spelled = function_name(name)
    if not is_function_name(spelled):
        raise InvalidInput(f"{name[:80]!r} is not the name of a function", field="function")
    return spelled
