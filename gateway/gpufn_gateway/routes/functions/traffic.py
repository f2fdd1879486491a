"""Routes of the split of a function's calls between its revisions."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.revision import Function
from gpufn_core.domain.traffic import WHOLE
from gpufn_core.protocol.reports import RevisionStatus, WorkerCounts
from gpufn_gateway.audit.request_audit import add_details, name_object
from gpufn_gateway.auth.scopes import DEPLOY, READ
from gpufn_gateway.calls.mirrored_calls import MirroredCalls
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.secret_use import check_secret_use
from gpufn_gateway.functions.splits import Splits
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import Traffic
from gpufn_gateway.routes.requests import json_response, principal_of, read_json, route


class TrafficRoutes:
    def __init__(self, registry: Registry, splits: Splits, mirrored: MirroredCalls, bodies: BodyReader) -> None:
        self._registry = registry
        self._splits = splits
        self._mirrored = mirrored
        self._bodies = bodies

    def routes(self) -> list[Route]:
        one = "/v1/functions/{fn:name}/traffic"
        return [
            route("GET", one, self.show, READ, of_functions=True),
            route("PUT", one, self.put, DEPLOY, of_functions=True),
            route("DELETE", one, self.clear, DEPLOY, of_functions=True),
            # It shows parts of results, which READ alone does not.
            route("GET", "/v1/functions/{fn:name}/differences", self.differences, DEPLOY, of_functions=True),
        ]

    async def show(self, request: Request) -> Response:
        return json_response(self._view(self._function(request, READ)))

    async def put(self, request: Request) -> Response:
        body = await read_json(request, Traffic, self._bodies)
        add_details(
            request.scope,
            weights=", ".join(f"{number}={weight}" for number, weight in sorted(body.weights.items())),
            headers=", ".join(f"{rule.name}={rule.value}:{rule.revision}" for rule in body.headers),
            mirror=None if body.mirror is None else body.mirror.revision,
            return_if=", ".join(body.return_if),
        )
        name, principal = self._function(request, DEPLOY).name, principal_of(request)
        check = functools.partial(check_secret_use, principal, self._registry)
        return json_response(self._view(await self._splits.divide(name, body, check)))

    async def clear(self, request: Request) -> Response:
        return json_response(self._view(await self._splits.clear(self._function(request, DEPLOY).name)))

    async def differences(self, request: Request) -> Response:
        function = self._function(request, DEPLOY)
        return json_response({"differences": self._mirrored.differences(function.name)})

    def _function(self, request: Request, verb: str) -> Function:
        """Return the function in the path. Raises FunctionNotFound, Forbidden."""
        principal = principal_of(request)
        function = self._registry.function(self._registry.find(request.path_params["fn"], principal))
        principal.require_on(verb, function.name)
        name_object(request.scope, "fn", function.name)
        return function

    def _view(self, function: Function) -> dict[str, Any]:
        """Return a TrafficView (docs/http.md). The counts are the controller's, and lag up to a second behind."""
        split = function.traffic
        return {
            "function": function.name,
            "active": function.active,
            "serving": function.serving,
            "weights": {function.serving: WHOLE} if split is None else split.weights,
            "set_at": None if split is None else split.set_at,
            "headers": [] if split is None else split.headers,
            "mirror": None if split is None else split.mirror,
            "return_if": [] if split is None else list(map(str, split.return_if)),
            "window_s": None if split is None else split.window_s,
            "min_calls": None if split is None else split.min_calls,
            "returned": function.returned,
            "revisions": self._revisions(function),
            "compared": self._mirrored.counts(function.name),
        }

    def _revisions(self, function: Function) -> list[RevisionStatus]:
        """Return the revisions with calls. A new split has no counts before the controller reports on it, and shows the
        workers of the last report."""
        status, split = self._registry.statuses.get(function.name), function.traffic
        workers: dict[int, WorkerCounts] = {}
        if status is not None:
            workers = {each.revision: each.workers for each in status.revisions} | {status.serving: status.workers}
        is_known = status is not None and split is not None and status.split_at == split.set_at
        known = {each.revision: each for each in status.revisions} if status is not None and is_known else {}
        numbers = {function.serving} if split is None else {*split.weights, *split.called}
        return [
            known.get(number) or RevisionStatus(revision=number, workers=workers.get(number, WorkerCounts()))
            for number in sorted(numbers)
        ]
