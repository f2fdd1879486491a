"""Route of profiles: what a worker of a function does now."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain import profile
from gpufn_core.errors import CapacityError, Conflict, InvocationNotFound, error_from
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.profiles import RATE, ProfileReply, ProfileRequest
from gpufn_core.spec.naming.names import shown
from gpufn_gateway.audit.request_audit import add_details, name_object
from gpufn_gateway.auth.scopes import DEPLOY
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import Profile
from gpufn_gateway.routes.requests import json_response, principal_of, read_json, route
from gpufn_platform.bus.connection import Bus
from gpufn_platform.queue import call_records

_REPLY_S: Final = 25.0  # after the seconds of the profile
FOLDED: Final = "text/plain; charset=utf-8"

_reply = msgspec.msgpack.Decoder(ProfileReply)


class ProfileRoutes:
    def __init__(self, bus: Bus, registry: Registry, bodies: BodyReader) -> None:
        self._bus = bus
        self._registry = registry
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [route("POST", "/v1/functions/{fn:name}/profile", self.create, DEPLOY, of_functions=True)]

    async def create(self, request: Request) -> Response:
        function = self._registry.find(request.path_params["fn"], principal_of(request))
        principal_of(request).require_on(DEPLOY, function)
        name_object(request.scope, "fn", function)
        body = await read_json(request, Profile, self._bodies)
        worker, node = await self._place(function, body)
        add_details(request.scope, worker=worker, node=node, seconds=body.seconds, kind=body.kind)
        wanted = encode(ProfileRequest(worker, body.seconds, body.idle))
        subject = subjects.memory_profile(node) if body.kind == "memory" else subjects.profile(node)
        response = await self._bus.request(subject, wanted, timeout_s=body.seconds + _REPLY_S)
        reply = _reply.decode(response.payload)
        if reply.error is not None:
            raise error_from(reply.error)
        headers = {"x-gpufn-worker": worker}
        if body.format == "folded":
            return Response(reply.stacks, 200, headers, FOLDED)
        stacks, rate = profile.parse(reply.stacks), RATE if body.kind == "cpu" else None
        return json_response(profile.speedscope(stacks, f"{function}, {worker}", rate=rate), 200, headers)

    async def _place(self, function: str, body: Profile) -> tuple[str, str]:
        """Return the worker to profile, and its node. Raises CapacityError, Conflict, InvocationNotFound."""
        workers = {
            process.worker: report.node
            for report in self._registry.live_nodes()
            for process in report.processes
            if process.function == function
        }
        if body.call:
            location = await call_records.locate(self._bus, body.call.lower())
            if location is None or location.worker not in workers:
                raise InvocationNotFound(f"No worker of {function} runs the call {shown(body.call)} now.")
            return location.worker, workers[location.worker]
        if body.worker:
            if body.worker not in workers:
                raise Conflict(f"{function} has no worker {shown(body.worker)}; it has {_listed(workers)}.")
            return body.worker, workers[body.worker]
        if not workers:
            raise CapacityError(f"{function} has no worker now: call it, and profile it meanwhile.")
        busy = {each.worker for report in self._registry.live_runners() for each in report.workers if each.in_use}
        chosen = next((each for each in workers if each in busy), next(iter(workers)))
        return chosen, workers[chosen]


def _listed(workers: dict[str, str]) -> str:
    return ", ".join(sorted(workers)) or "none"
