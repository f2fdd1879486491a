"""Submitted invocations: queue one, see how it is, fetch its result, cancel it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gpufn.invocation import InvocationState
from gpufn.protocol.messages import CallRecord
from gpufn_gateway import problems
from gpufn_gateway.answers import OWN, send_problem, send_result
from gpufn_gateway.problems import Headers
from gpufn_gateway.routes.requests import headers_of, json_answer, number, principal_of
from gpufn_gateway.submit import Submissions

_LONGEST_WAIT_S = 60.0  # proxies cut longer ones; the client asks again


class InvocationRoutes:
    def __init__(self, submissions: Submissions) -> None:
        self._submissions = submissions

    def routes(self) -> list[Route]:
        one = "/v1/invocations/{id}"
        return [
            Route("/v1/functions/{fn}/submit", self.submit, methods=["POST"]),
            Route("/v1/functions/{fn}/invocations/{id}", self.submit, methods=["PUT"]),
            Route(one, self.show, methods=["GET"]),
            Route(one, self.cancel, methods=["DELETE"]),
            Route(f"{one}/result", self.result, methods=["GET"]),
        ]

    async def submit(self, request: Request) -> _Submit:
        return _Submit(self._submissions, request)

    async def show(self, request: Request) -> Response:
        return json_answer(await self._submissions.status(request.path_params["id"], principal_of(request)))

    async def cancel(self, request: Request) -> Response:
        record, cancelled = await self._submissions.cancel(request.path_params["id"], principal_of(request))
        return json_answer({**await self._submissions.view(record), "cancelled": cancelled})

    async def result(self, request: Request) -> Response | _Result:
        wait_s = number(request, "wait", 0.0, 0.0, _LONGEST_WAIT_S)
        record, body = await self._submissions.result(request.path_params["id"], principal_of(request), wait_s)
        if record.state.ended:
            return _Result(record, body)
        return json_answer(await self._submissions.view(record), 202)


class _Submit:
    def __init__(self, submissions: Submissions, request: Request) -> None:
        self._submissions = submissions
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        params = self._request.path_params
        headers = headers_of(self._request)
        await self._submissions.submit(params["fn"], headers, receive, send, invocation=params.get("id"))


class _Result:
    """The answer that an invoke would have given."""

    def __init__(self, record: CallRecord, body: bytes) -> None:
        self._record = record
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, body = self._record, self._body
        headers: Headers = [
            (b"x-gpufn-invocation", record.id.encode()),
            (b"x-gpufn-revision", f"{record.function}@{record.revision}".encode()),
        ]
        if record.queue_s is not None and record.run_s is not None:
            timing = b"queue;dur=%.1f, run;dur=%.1f" % (record.queue_s * 1e3, record.run_s * 1e3)
            headers.append((b"server-timing", timing))
        if record.state is InvocationState.SUCCEEDED:
            await send_result(send, OWN, record.content_type, body, headers)
        else:
            await send_problem(send, OWN, problems.from_state(record.state, record.error), headers)
