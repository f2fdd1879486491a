"""RunPod's paths, at `/v2` beside the Open Inference Protocol and alone at `/runpod/v2`."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.spec.naming.names import IN_PATH, RESERVED_NAMES
from gpufn_gateway.problems import Problem
from gpufn_gateway.protocols.adapter import Adapter, JsonErrors
from gpufn_gateway.protocols.captured import Outcome
from gpufn_gateway.protocols.platform import Platform, json_of
from gpufn_gateway.protocols.runpod import jobs
from gpufn_gateway.routes.requests import json_response, number, route

_PREFIX: Final = "/runpod/v2"
_PREFIXES: Final = (_PREFIX, "/v2")
_VERBS: Final = r"run|runsync|purge-queue|health|(?:status|stream|cancel|retry)/[^/]+"
_OWN: Final = re.compile(rf"/v2/(?!(?:{'|'.join(sorted(RESERVED_NAMES))})/)(?:{IN_PATH.pattern})/(?:{_VERBS})")
_BEARER: Final = b"bearer "
_DEFAULT_WAIT_MS: Final = 90_000
_LONGEST_WAIT_MS: Final = 300_000
_MAX_STREAMED: Final = 10_000  # jobs whose stream a client has read


class _RunPodErrors(JsonErrors):
    """Errors as `{"error": "..."}`. Arguments that do not fit are a 400."""

    statuses: ClassVar = {422: 400}

    def body(self, problem: Problem) -> object:
        return {"error": problem.info.message}


class RunPod(Adapter):
    errors = _RunPodErrors()
    audited = frozenset(f"{prefix}/{{fn}}/retry/{{id}}" for prefix in _PREFIXES)  # replays of dead letters
    webhooks: ClassVar = {jobs.FORM: jobs.webhook_payload}

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        self._streamed: OrderedDict[str, int] = OrderedDict()

    def owns(self, path: str) -> bool:
        return path.startswith(f"{_PREFIX}/") or _OWN.fullmatch(path) is not None

    def api_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the key of a client that sends `Authorization: KEY`, as RunPod permits."""
        given = headers.get(b"authorization", b"").strip()
        return given if given and not given.lower().startswith(_BEARER) and b" " not in given else None

    def routes(self) -> list[Route]:
        return [
            each
            for prefix in _PREFIXES
            for each in (
                route("POST", f"{prefix}/{{fn:name}}/run", self.run),
                route("POST", f"{prefix}/{{fn:name}}/runsync", self.runsync),
                route("POST", f"{prefix}/{{fn:name}}/purge-queue", self.purge_queue, scans=True),
                route("GET", f"{prefix}/{{fn:name}}/health", self.health),
                route("GET", f"{prefix}/{{fn:name}}/status/{{id}}", self.status),
                route("GET", f"{prefix}/{{fn:name}}/stream/{{id}}", self.stream),
                route("POST", f"{prefix}/{{fn:name}}/cancel/{{id}}", self.cancel),
                route("POST", f"{prefix}/{{fn:name}}/retry/{{id}}", self.retry),
            )
        ]

    async def run(self, request: Request) -> Response:
        job = jobs.new_job(await self.platform.body(request))
        streams = self.platform.resolve(_function(request), request).method.kind.streams
        options = job.options()._replace(is_live=streams)
        record = await self.platform.submit(_function(request), job.arguments, request, options)
        return json_response({"id": record.id, "status": jobs.state(record.state)})

    async def runsync(self, request: Request) -> Response:
        """Submit a job and wait for it. A job that takes longer is returned as it is, and the client polls."""
        wait_ms = number(request, "wait", _DEFAULT_WAIT_MS, 0, _LONGEST_WAIT_MS)
        job = jobs.new_job(await self.platform.body(request))
        record = await self.platform.submit(_function(request), job.arguments, request, job.options())
        return json_response(await self._job(request, record.id, wait_ms / 1000))

    async def status(self, request: Request) -> Response:
        return json_response(await self._job(request, _id(request)))

    async def stream(self, request: Request) -> Response:
        """Return the items that this gateway has not returned yet: as they arrive if it follows the job, otherwise at
        its end. An empty response of an ended job ends the client's loop."""
        job = await self._job(request, _id(request))
        sent = self._streamed.get(job["id"], 0)
        if job["status"] == "COMPLETED":
            output = msgspec.json.decode(job["output"])
            items = (output if isinstance(output, list) else [output])[sent:]
            self.platform.live.forget(job["id"])
        else:
            live = self.platform.live.after(job["id"], sent)
            items = [msgspec.json.decode(json_of(Outcome(item.content_type, item.body, []))) for item in live]
        if items:
            self._streamed[job["id"]] = sent + len(items)
            if len(self._streamed) > _MAX_STREAMED:
                self._streamed.popitem(last=False)
        # The client loops until it sees a status that it takes as final, which CANCELLED is not.
        status = "FAILED" if job["status"] == "CANCELLED" else job["status"]
        return json_response({"status": status, "stream": [{"output": item} for item in items]})

    async def cancel(self, request: Request) -> Response:
        record = await self.platform.cancel(_id(request), request, of=_function(request))
        return json_response({"id": record.id, "status": jobs.state(record.state)})

    async def retry(self, request: Request) -> Response:
        record = await self.platform.retry(_function(request), _id(request), request)
        return json_response({"id": record.id, "status": jobs.state(record.state)})

    async def purge_queue(self, request: Request) -> Response:
        removed = await self.platform.cancel_queued(_function(request), request)
        return json_response({"removed": removed, "status": "completed"})

    async def health(self, request: Request) -> Response:
        return json_response(jobs.health(self.platform.figures(_function(request), request)))

    async def _job(self, request: Request, invocation: str, wait_s: float = 0.0) -> dict[str, Any]:
        view, outcome = await self.platform.result(invocation, request, wait_s, of=_function(request))
        return jobs.job(view, None if outcome is None else json_of(outcome))


def _function(request: Request) -> str:
    return str(request.path_params["fn"])


def _id(request: Request) -> str:
    return str(request.path_params["id"]).lower()
