"""Route of profiles: the present work of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.profiles.stacks import parse, speedscope
from gpufn_core.errors import CapacityError, Conflict, InvocationNotFound, error_from
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.profiles import GPU_EXTRA_S, RATE, ProfileKind, ProfileReply, ProfileRequest
from gpufn_core.protocol.reports import RunnerReport
from gpufn_core.spec.naming.names import shown
from gpufn_gateway.audit.request_audit import add_details, name_object
from gpufn_gateway.auth.scopes import DEPLOY
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.http.body_reader import BodyReader, ClientDisconnected
from gpufn_gateway.openapi.request_bodies import Profile
from gpufn_gateway.routes.requests import CHECK_KEY, json_response, principal_of, read_json, route
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue.records import call_records

_REPLY_S: Final = 25.0  # after the seconds of the profile
WAITS_AT_ONCE: Final = 16  # each looks at all workers
_LOOK_S: Final = 0.2  # between looks at the reports of runners and agents, which come each second
_REPORTED_S: Final = 3.0
FOLDED: Final = "text/plain; charset=utf-8"
TRACE: Final = "application/gzip"
_LOCATE_S: Final = 2.0  # the runner of a busy node may respond late, and a profile takes seconds anyway

_reply = msgspec.msgpack.Decoder(ProfileReply)


class ProfiledWorker(NamedTuple):
    """The worker to profile. `call` is the slow call that was waited for."""

    worker: str
    node: str
    call: str = ""


class ProfileRoutes:
    def __init__(self, bus: Bus, registry: Registry, bodies: BodyReader, clock: Clock) -> None:
        self._bus = bus
        self._registry = registry
        self._bodies = bodies
        self._clock = clock
        self._waits = asyncio.Semaphore(WAITS_AT_ONCE)

    def routes(self) -> list[Route]:
        return [route("POST", "/v1/functions/{fn:name}/profile", self.create, DEPLOY, of_functions=True)]

    async def create(self, request: Request) -> Response:
        function = self._registry.find(request.path_params["fn"], principal_of(request))
        principal_of(request).require_on(DEPLOY, function)
        name_object(request.scope, "fn", function)
        body = await read_json(request, Profile, self._bodies)
        worker, node, call = await self._place(request, function, body)
        add_details(request.scope, worker=worker, node=node, seconds=body.seconds, kind=body.kind.value)
        reply = await self._request(node, ProfileRequest(worker, body.seconds, body.idle, body.kind))
        headers = {"x-gpufn-worker": worker} | ({"x-gpufn-invocation": call} if call else {})
        if body.kind is ProfileKind.GPU:
            return Response(reply.trace, 200, headers, TRACE)
        if body.format == "folded":
            return Response(reply.stacks, 200, headers, FOLDED)
        stacks, rate = parse(reply.stacks), RATE if body.kind is ProfileKind.CPU else None
        return json_response(speedscope(stacks, f"{function}, {worker}", rate=rate), 200, headers)

    async def _request(self, node: str, wanted: ProfileRequest) -> ProfileReply:
        """Have the agent or the runner of a node make a profile. Raises the error of its reply."""
        is_from_outside = wanted.kind is ProfileKind.CPU
        subject = subjects.profile(node) if is_from_outside else subjects.worker_profile(node)
        extra_s = GPU_EXTRA_S if wanted.kind is ProfileKind.GPU else 0.0
        response = await self._bus.request(subject, encode(wanted), timeout_s=wanted.seconds + _REPLY_S + extra_s)
        reply = _reply.decode(response.payload)
        if reply.error is not None:
            raise error_from(reply.error)
        return reply

    async def _place(self, request: Request, function: str, body: Profile) -> ProfiledWorker:
        """Return the worker to profile, and its node. Raises CapacityError, Conflict, InvocationNotFound."""
        if body.slower_than_s:
            return await self._wait_for_slow_call(request, function, body)
        if body.call:
            return await self._worker_of_call(function, body.call)
        workers = self._workers_of(function)
        if body.worker:
            if body.worker not in workers:
                raise Conflict(f"{function} has no worker {shown(body.worker)}; it has {_listed(workers)}.")
            return ProfiledWorker(body.worker, workers[body.worker])
        if not workers:
            raise CapacityError(f"{function} has no worker now: call it, and profile it meanwhile.")
        busy = {each.worker for report in self._registry.live_runners() for each in report.workers if each.in_use}
        chosen = next((each for each in workers if each in busy), next(iter(workers)))
        return ProfiledWorker(chosen, workers[chosen])

    def _workers_of(self, function: str) -> dict[str, str]:
        """Return the node of each reported worker."""
        return {
            process.worker: report.node
            for report in self._registry.live_nodes()
            for process in report.processes
            if process.function == function
        }

    async def _worker_of_call(self, function: str, call: str) -> ProfiledWorker:
        """Return the worker that runs the call. A worker that has just started may not be reported yet."""
        location = await call_records.locate(self._bus, call.lower(), within_s=_LOCATE_S)
        give_up = self._clock.monotonic() + _REPORTED_S
        while location is not None:
            if (node := self._workers_of(function).get(location.worker)) is not None:
                return ProfiledWorker(location.worker, node)
            if self._clock.monotonic() >= give_up:
                break
            await asyncio.sleep(_LOOK_S)
        raise InvocationNotFound(f"No worker of {function} runs the call {shown(call)} now.")

    async def _wait_for_slow_call(self, request: Request, function: str, body: Profile) -> ProfiledWorker:
        """Return the first worker whose call has run for so long. Raises InvocationNotFound, CapacityError,
        Unauthorized if the key ends meanwhile, ClientDisconnected."""
        if self._waits.locked():
            raise CapacityError(f"{WAITS_AT_ONCE} profiles wait for slow calls at this gateway: try again later.")
        async with self._waits:
            give_up = self._clock.monotonic() + body.wait_s
            while (chosen := slow_call(self._registry.live_runners(), function, body.slower_than_s)) is None:
                if self._clock.monotonic() >= give_up:
                    raise InvocationNotFound(
                        f"No call of {function} ran for {body.slower_than_s:g} s within {body.wait_s:g} s: "
                        "wait longer, or choose a shorter time."
                    )
                await asyncio.sleep(_LOOK_S)
                request.scope[CHECK_KEY]()
                if await request.is_disconnected():
                    raise ClientDisconnected
            return chosen


def slow_call(reports: Iterable[RunnerReport], function: str, slower_than_s: float) -> ProfiledWorker | None:
    """Return a worker whose call had run for so long when its runner reported."""
    for report in reports:
        for each in report.workers:
            began = each.longest_call_at if each.function == function else None
            if began is not None and report.sent_at - began >= slower_than_s:
                return ProfiledWorker(each.worker, report.node, each.longest_call)
    return None


def _listed(workers: dict[str, str]) -> str:
    return ", ".join(sorted(workers)) or "none"
