"""OpenFaaS's paths: `/function`, `/async-function` and the paths of `/system` that `faas-cli` reads."""

from __future__ import annotations

import base64
import binascii
import importlib.metadata
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import PayloadTooLarge
from gpufn_core.protocol.records import CallRecord
from gpufn_gateway import problems
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.responses import GPUFN_FORMAT, USER_CONTENT
from gpufn_gateway.problems import Headers, Problem
from gpufn_gateway.protocols.adapter import Adapter
from gpufn_gateway.protocols.openfaas import results
from gpufn_gateway.protocols.platform import CallOptions
from gpufn_gateway.protocols.raw_bodies import arguments_of
from gpufn_gateway.routes.requests import json_response, route
from gpufn_gateway.webhooks.payload import Payload

_FORM: Final = "openfaas"
_BASIC: Final = b"basic "
_PREFIXES: Final = ("/function/", "/async-function/", "/system/")
_METHODS: Final = ("GET", "POST", "PUT", "DELETE")
_NAMESPACE: Final = "default"


class _TextErrors:
    """Errors as a line of text. Arguments that do not fit are a 400."""

    statuses: ClassVar = {422: 400}

    result = staticmethod(GPUFN_FORMAT.result)

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        headers = [header for header in problem.headers() if header[0] != b"content-type"]
        headers.append((b"content-type", b"text/plain; charset=utf-8"))
        return self.statuses.get(problem.status, problem.status), headers, f"{problem.info.message}\n".encode()


def callback(record: CallRecord, result: bytes) -> Payload:
    """Return the callback of a call that has ended: the bare result, or the message of an error."""
    status, body = 200, (result, record.content_type)
    if record.state is not InvocationState.SUCCEEDED:
        problem = problems.from_state(record.state, record.error)
        status, body = problem.status, (problem.info.message.encode(), "text/plain")
    elif record.blob:
        problem = problems.from_info(
            PayloadTooLarge(
                f"The result has {record.size:,} bytes, too many for a callback. Read it at "
                f"/v1/invocations/{record.id}/result."
            ).info()
        )
        status, body = problem.status, (problem.info.message.encode(), "text/plain")
    data, content_type = results.raw(*body)
    duration_s = (record.ended_at or record.submitted_at) - record.submitted_at
    headers = {
        "content-type": negotiation.clean(content_type),
        "x-call-id": record.id,
        "x-duration-seconds": f"{duration_s:.6f}",
        "x-function-name": record.function,
        "x-function-status": str(status),
    }
    return Payload(data, headers)


class OpenFaaS(Adapter):
    errors = _TextErrors()
    webhooks: ClassVar = {_FORM: callback}

    def owns(self, path: str) -> bool:
        return path.startswith(_PREFIXES)

    def api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the password of `Authorization: Basic`, as `faas-cli login` sends it."""
        given = headers.get(b"authorization", b"").strip()
        if not given.lower().startswith(_BASIC):
            return None
        try:
            return base64.b64decode(given[len(_BASIC) :], validate=True).partition(b":")[2]
        except binascii.Error:
            return None

    def routes(self) -> list[Route]:
        return [
            *(route(method, "/function/{fn:name}", self.call) for method in _METHODS),
            route("POST", "/async-function/{fn:name}", self.submit),
            route("GET", "/system/functions", self.functions, scans=True),
            route("GET", "/system/function/{fn:name}", self.function),
            route("GET", "/system/info", self.info),
            route("GET", "/system/namespaces", self.namespaces),
        ]

    async def call(self, request: Request) -> Response:
        started_at, start = time.time_ns(), time.perf_counter()
        target, arguments = await self._arguments(request)
        outcome = await self.platform.invoke(target.path, arguments, request)
        body, content_type = results.raw(outcome.body, outcome.content_type)
        call = next((value.decode() for name, value in outcome.headers if name == b"x-gpufn-invocation"), "")
        headers = {name.decode(): value.decode() for name, value in USER_CONTENT} | {
            "content-type": negotiation.clean(content_type),
            "x-call-id": call,
            "x-start-time": str(started_at),
            "x-duration-seconds": f"{time.perf_counter() - start:.6f}",
        }
        return Response(body, headers=headers)

    async def submit(self, request: Request) -> Response:
        """Submit a call. The response has no body, and the result goes to `X-Callback-Url`."""
        started_at = time.time_ns()
        target, arguments = await self._arguments(request)
        options = CallOptions(webhook=request.headers.get("x-callback-url"), webhook_form=_FORM)
        record = await self.platform.submit(target.path, arguments, request, options)
        return Response(status_code=202, headers={"x-call-id": record.id, "x-start-time": str(started_at)})

    async def _arguments(self, request: Request) -> tuple[Target, bytes]:
        target = self.platform.resolve(_function(request), request)
        body = await self.platform.body(request)
        return target, arguments_of(target.method, request.headers.get("content-type", ""), body)

    async def functions(self, request: Request) -> Response:
        return json_response([self._status(target, request) for target in self.platform.functions(request)])

    async def function(self, request: Request) -> Response:
        return json_response(self._status(self.platform.resolve(_function(request), request), request))

    async def info(self, request: Request) -> Response:
        version = {"release": importlib.metadata.version("gpufn"), "sha": "", "commit_message": ""}
        provider = {"provider": "gpufn", "orchestration": "gpufn", "version": version}
        return json_response({"provider": provider, "version": version, "arch": ""})

    async def namespaces(self, request: Request) -> Response:
        return json_response([_NAMESPACE])

    def _status(self, target: Target, request: Request) -> dict[str, Any]:
        figures = self.platform.figures(target.path, request)
        return {
            "name": target.path,
            "image": str(target.revision),
            "namespace": _NAMESPACE,
            "replicas": figures.ready + figures.starting,
            "availableReplicas": figures.ready,
            "invocationCount": figures.succeeded + figures.failed,
            "labels": {},
            "annotations": {},
        }


def _function(request: Request) -> str:
    return str(request.path_params["fn"])
