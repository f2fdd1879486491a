"""Routes of schedules: list, add, remove, pause, run now."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.protocol.records import ScheduleRecord
from gpufn_core.spec.schedule import next_time
from gpufn_gateway.audit.request_audit import add_details
from gpufn_gateway.auth.scopes import INVOKE, READ
from gpufn_gateway.calls.prepare import Calls, check_priority
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import NewSchedule
from gpufn_gateway.routes.requests import json_response, principal_of, read_json, route
from gpufn_gateway.schedules.store import Schedules, no_such_schedule
from gpufn_gateway.submitted import call_views


class ScheduleRoutes:
    def __init__(self, schedules: Schedules, calls: Calls, bodies: BodyReader) -> None:
        self._schedules = schedules
        self._calls = calls
        self._registry = calls.registry
        self._bodies = bodies
        self._clock = calls.clock

    def routes(self) -> list[Route]:
        one = "/v1/schedules/{id:name}"
        return [
            route("GET", "/v1/schedules", self.index, READ, of_functions=True, scans=True),
            route("POST", "/v1/schedules", self.add),
            route("GET", one, self.show, READ, of_functions=True),
            route("DELETE", one, self.remove),
            route("POST", f"{one}/pause", self.pause),
            route("POST", f"{one}/resume", self.resume),
            route("POST", f"{one}/run", self.run),
        ]

    async def index(self, request: Request) -> Response:
        function = request.query_params.get("function")
        principal = principal_of(request)
        name = None if function is None else self._registry.find(function, principal)
        records = [
            record
            for record in self._schedules.known.values()
            if name in (None, record.function) and principal.may_read(record.function)
        ]
        return json_response(
            {"schedules": [self._view(record) for record in sorted(records, key=lambda record: record.id)]}
        )

    async def add(self, request: Request) -> Response:
        body = await read_json(request, NewSchedule, self._bodies)
        principal = principal_of(request)
        path = f"{body.function}.{body.method}" if body.method else body.function
        target = self._registry.resolve(path, principal)
        principal.require_invoke(target.name)
        add_details(request.scope, function=target.name, cron=body.cron)
        check_priority(body.priority, target.revision.spec, principal)
        now = self._clock.time()
        record = await self._schedules.add(target, body.schedule(now), now)
        return json_response(self._view(record), 201, {"Location": f"/v1/schedules/{record.id}"})

    async def show(self, request: Request) -> Response:
        return json_response(self._view(self._record(request, READ)))

    async def remove(self, request: Request) -> Response:
        await self._schedules.remove(self._record(request, INVOKE).id)
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        return json_response(self._view(await self._schedules.pause(self._record(request, INVOKE).id, paused=True)))

    async def resume(self, request: Request) -> Response:
        return json_response(self._view(await self._schedules.pause(self._record(request, INVOKE).id, paused=False)))

    async def run(self, request: Request) -> Response:
        """Submit one call now. The schedule itself does not change."""
        record = self._record(request, INVOKE)
        principal, schedule = principal_of(request), record.schedule
        target = self._registry.target(record.function, schedule.method)
        async with self._calls.admitting(principal, target, schedule.priority):
            call = await self._schedules.submit(record, owner=principal.owner)
        links = call_views.links(call.id)
        return json_response({"id": call.id, "state": call.state, "links": links}, 202, {"Location": links["self"]})

    def _record(self, request: Request, verb: str) -> ScheduleRecord:
        """Return the schedule in the path. Raises ScheduleNotFound, also for one of a function that the client may not
        see; Forbidden."""
        id_, principal = request.path_params["id"], principal_of(request)
        record = self._schedules.get(id_)
        principal.require_visible(record.function, no_such_schedule(id_))
        principal.require_on(verb, record.function)
        return record

    def _view(self, record: ScheduleRecord) -> dict[str, Any]:
        schedule = record.schedule
        return {
            "id": record.id,
            "function": record.function,
            "method": schedule.method,
            "cron": schedule.cron or None,
            "timezone": schedule.timezone,
            "missed": schedule.missed,
            "arguments": schedule.arguments,
            "priority": schedule.priority,
            "paused": record.paused,
            "declared": record.declared,
            "created_at": record.created_at,
            "next_at": None if record.paused else next_time(schedule, self._clock.time()),
            "invocation": record.invocation or None,
        }
