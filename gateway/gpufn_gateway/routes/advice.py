"""Route of advice: which options of a function its history calls in question."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.history import advice
from gpufn_gateway.history.collector import function_subject
from gpufn_gateway.history.recorder import Recorder
from gpufn_gateway.routes.requests import json_response, principal_of, route
from gpufn_platform.process.clock import Clock

_BY_MINUTE = ("calls_by_minute", "busy_by_minute")  # thousands of values, which `GET /v1/history` has


class AdviceRoutes:
    def __init__(self, recorder: Recorder, registry: Registry, clock: Clock) -> None:
        self._recorder = recorder
        self._registry = registry
        self._clock = clock

    def routes(self) -> list[Route]:
        return [route("GET", "/v1/functions/{fn:name}/advice", self.show, READ, of_functions=True, scans=True)]

    async def show(self, request: Request) -> Response:
        principal = principal_of(request)
        name = self._registry.find(request.path_params["fn"], principal)
        principal.require_on(READ, name)
        function = self._registry.function(name)
        spec, now = self._registry.serving(function).spec, self._clock.time()
        use = await self._recorder.query(lambda index: advice.recorded_use(index.read, function_subject(name), now))
        figures = msgspec.structs.asdict(use)
        return json_response(
            {
                "function": name,
                "advice": advice.advise(spec, use, function.min_workers),
                "idle_timeout": advice.replay(use.calls_by_minute, spec.scaling.idle_timeout_s),
                "seen": {key: value for key, value in figures.items() if key not in _BY_MINUTE},
            }
        )
