"""Routes of functions: deploy, show, roll back, scale, delete; wait reasons, logs and calls."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.revision import Function, Revision, Variant
from gpufn_core.domain.traffic import Split
from gpufn_core.encoding import media
from gpufn_core.errors import BusUnavailable, InvalidInput, InvalidSpec, UnsupportedMediaType
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import LogLine
from gpufn_core.protocol.reports import FunctionStatus, WorkerCounts
from gpufn_core.spec.function_spec import FunctionSpec, spec_from_json
from gpufn_core.spec.naming.names import canonical
from gpufn_core.spec.priority import Priority
from gpufn_gateway.arguments.signature import MAX_DEPTH, depth_of
from gpufn_gateway.audit.request_audit import add_details, name_object
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import DEPLOY, HI, READ
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.functions.deploys import Deploys, check_lease
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.secret_use import check_secret_use
from gpufn_gateway.functions.splits import Splits
from gpufn_gateway.functions.variants import Variants
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import Deploy, LeaseRequest, Rollback, Scale
from gpufn_gateway.openapi.request_bounds import MAX_LOG_LINES
from gpufn_gateway.routes.calls.invocations import list_calls
from gpufn_gateway.routes.functions.builds import build_view
from gpufn_gateway.routes.requests import (
    StreamedResponse,
    checked_digest,
    digest_in,
    flag,
    headers_of,
    json_response,
    number,
    principal_of,
    read_json,
    route,
    turns_of,
    whole_number,
)
from gpufn_gateway.submitted.submit import Submissions
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, stream_scan, streams
from gpufn_platform.bus.storage.ordered_reader import StoredMessage
from gpufn_platform.queue import queue_position

_LINES_AT_ONCE: Final = 200
_log_line = msgspec.msgpack.Decoder(LogLine)


@dataclass(kw_only=True, eq=False)
class FunctionRoutes:
    bus: Bus
    registry: Registry
    deploys: Deploys
    builds: Builds
    splits: Splits
    variants: Variants
    submissions: Submissions
    bodies: BodyReader
    bundle_bodies: BodyReader

    def routes(self) -> list[Route]:
        one = "/v1/functions/{fn:name}"
        return [
            route("GET", "/v1/functions", self.index, READ, of_functions=True, scans=True),
            route("POST", "/v1/functions", self.deploy, DEPLOY, of_functions=True),
            route("GET", one, self.show, READ, of_functions=True),
            route("DELETE", one, self.delete, DEPLOY, of_functions=True),
            route("GET", f"{one}/revisions", self.revisions, READ, of_functions=True),
            route("GET", f"{one}/revisions/{{number}}", self.revision, READ, of_functions=True),
            route("GET", f"{one}/revisions/{{number}}/bundle", self.bundle, DEPLOY, of_functions=True),
            route("POST", f"{one}/lease", self.renew, DEPLOY, of_functions=True),
            route("POST", f"{one}/rollback", self.rollback, DEPLOY, of_functions=True),
            route("POST", f"{one}/scale", self.scale, DEPLOY, of_functions=True),
            route("GET", f"{one}/why", self.why),
            route("GET", f"{one}/logs", self.logs, READ, of_functions=True),
            route("GET", f"{one}/calls", self.calls, READ, of_functions=True, scans=True),
            route("HEAD", "/v1/bundles/{digest}", self.has_bundle, DEPLOY, of_functions=True),
            route("PUT", "/v1/bundles/{digest}", self.put_bundle, DEPLOY, of_functions=True),
        ]

    async def index(self, request: Request) -> Response:
        principal, include_env = principal_of(request), _wants_env_values(request)
        functions = sorted(self.registry.functions.values(), key=lambda function: function.name)
        views = [
            self._view(function, principal, include_env and principal.may(DEPLOY, function.name))
            for function in functions
            if principal.may_read(function.name)
        ]
        return json_response({"functions": views})

    async def deploy(self, request: Request) -> Response:
        principal = principal_of(request)
        body = await read_json(request, Deploy, self.bodies)
        spec_json = bytes(body.spec)
        if depth_of(spec_json) > MAX_DEPTH:
            raise InvalidSpec(f"the spec is nested more than {MAX_DEPTH} levels deep")
        spec = spec_from_json(spec_json)
        principal.require_on(DEPLOY, spec.name)
        if Priority.HI in (spec.priority, spec.schedule and spec.schedule.priority):
            principal.require(HI)
        bundle = checked_digest(body.bundle, "the bundle")
        signed_by = body.signature and body.signature.key
        add_details(request.scope, function=spec.name, bundle=bundle, signed_by=signed_by, traffic=body.traffic)
        source = body.source and msgspec.structs.replace(body.source, key=principal.id)
        deploy_id = body.deploy_id or new_ulid()
        options = DeployOptions(
            check=body.check,
            source=source,
            replace=body.replace,
            code=body.code,
            deploy_id=deploy_id,
            signature=body.signature,
            principal=principal,
            lease=None if body.lease is None else body.lease.lease(),
        )
        if spec.models:
            if body.traffic is not None:
                raise InvalidSpec(
                    f"{spec.name}: with models, deploy without --traffic, `gpufn rollback`, then `gpufn traffic`."
                )
            revision = await self.deploys.build(spec, bundle, options)
            url = f"/v1/functions/{revision.function}/revisions/{revision.number}"
            view = {"function": revision.function, "revision": revision.number, "state": revision.state}
            return json_response(view | {"builds": revision.builds}, 202, {"Location": url})
        if body.traffic is not None and spec.name in self.registry.functions:
            return await self._deploy_canary(spec, bundle, options, body.traffic)
        function = await self.deploys.deploy(spec, bundle, options)
        return json_response(self._view(function, principal), 201, {"Location": f"/v1/functions/{function.name}"})

    async def _deploy_canary(self, spec: FunctionSpec, bundle: str, options: DeployOptions, percent: int) -> Response:
        await self.splits.check_canary(spec.name)
        revision = await self.deploys.add(spec, bundle, options)
        function = await self.splits.add_canary(revision, percent)
        view = self._view(function, options.principal) | {"canary": revision.number}
        return json_response(view, 201, {"Location": f"/v1/functions/{function.name}"})

    async def show(self, request: Request) -> Response:
        function, include_env = self._function(request, READ), _wants_env_values(request)
        if include_env:
            principal_of(request).require_on(DEPLOY, function.name)
        return json_response(self._view(function, principal_of(request), include_env))

    async def delete(self, request: Request) -> Response:
        principal = principal_of(request)
        name = self.registry.find_or_deleted(request.path_params["fn"], principal)
        if not self.registry.is_being_built(name):
            name = self._function(request, DEPLOY).name
        principal.require_on(DEPLOY, name)
        lease = request.query_params.get("lease")
        if lease == "":
            raise InvalidInput("lease must be the id of a lease", field="lease")

        def check(function: Function) -> None:
            if lease is not None:
                check_lease(function, lease)

        await self.deploys.delete(name, check)
        return Response(status_code=204)

    async def revisions(self, request: Request) -> Response:
        function = self._function(request, READ)
        revisions = sorted(self.registry.revisions.get(function.name, {}).items())
        views = [_revision_view(revision, function) for _, revision in revisions]
        return json_response({"revisions": views})

    async def revision(self, request: Request) -> Response:
        """Show a revision, even if its Function does not exist yet."""
        include_env = _wants_env_values(request)
        revision, principal = self._revision(request, READ), principal_of(request)
        if include_env:
            principal.require_on(DEPLOY, revision.function)
        known = self.builds.known
        function = self.registry.functions.get(revision.function)
        return json_response(
            {
                **_revision_view(revision, function),
                "function": revision.function,
                "builds": [
                    build_view(self.builds, known[build], principal) for build in revision.builds if build in known
                ],
                "engines": revision.engines,
                "error": revision.error,
                "check": revision.check,
                "source": revision.source,
                "spec": _spec_view(revision.spec, include_env),
                "env": list(revision.spec.env),
            }
        )

    async def bundle(self, request: Request) -> Response:
        """Send the code of a revision. It needs `deploy`, as the values of `env` do, because code may have secrets."""
        revision = self._revision(request, DEPLOY)
        data = await object_store.get(self.bus, subjects.BUNDLES, revision.bundle)
        return Response(data, media_type="application/zip")

    async def renew(self, request: Request) -> Response:
        body = await read_json(request, LeaseRequest, self.bodies)
        function = await self.deploys.renew(self._function(request, DEPLOY).name, body.lease())
        return json_response(self._view(function, principal_of(request)))

    async def rollback(self, request: Request) -> Response:
        body = await read_json(request, Rollback, self.bodies)
        add_details(request.scope, revision=body.revision)
        name, principal = self._function(request, DEPLOY).name, principal_of(request)
        check = functools.partial(check_secret_use, principal, self.registry)
        return json_response(self._view(await self.deploys.rollback(name, body.revision, check), principal))

    async def scale(self, request: Request) -> Response:
        body = await read_json(request, Scale, self.bodies)
        add_details(request.scope, min_workers=body.min_workers, max_workers=body.max_workers)
        name = self._function(request, DEPLOY).name
        function = await self.deploys.scale(name, body.min_workers, body.max_workers)
        return json_response(self._view(function, principal_of(request)))

    async def why(self, request: Request) -> Response:
        function, principal = self._visible(request), principal_of(request)
        principal.require_invoke_or_read(function.name)
        status = self._status(function, principal)
        return json_response(
            {
                "function": function.name,
                **_status_view(status),
                "classes": await self._queued_by_priority(function),
                "reason": status.reason or "the controller has not reported on it yet",
                "terms": status.terms,
            }
        )

    async def _queued_by_priority(self, function: Function) -> dict[Priority, int] | None:
        try:
            stored = await queue_position.stored(self.bus, function.name, function.serving)
        except BusUnavailable:
            return None
        return {
            priority: sum(count for queue_key, count in stored.items() if queue_key.priority is priority)
            for priority in Priority
        }

    async def logs(self, request: Request) -> StreamedResponse:
        """Send the last log lines of a function, or the lines of a call (`?call=ID`) among them. With `?follow=true`,
        send new ones until the client disconnects."""
        function = self._function(request, READ)
        call = request.query_params.get("call", "").lower()
        tail = int(number(request, "tail", MAX_LOG_LINES if call else 100, 0, MAX_LOG_LINES))
        follow = flag(request, "follow")
        # Get the last sequence before the history is read, so that no line between the two is missed.
        info = await self.bus.js(f"STREAM.INFO.{subjects.LOGS}")
        turns = turns_of(request)
        lines = self._log_lines(turns, function.name, tail, int(info["state"]["last_seq"]), follow=follow, call=call)
        return StreamedResponse([(b"content-type", media.LINES.encode())], lines)

    async def _log_lines(
        self, turns: asyncio.Semaphore, function: str, tail: int, last_seq: int, *, follow: bool, call: str
    ) -> AsyncIterator[bytes]:
        subject = subjects.logs(function)
        async with turns:
            newest = await stream_scan.newest(self.bus, subjects.LOGS, subject, last=tail)
            for start in range(0, len(newest), _LINES_AT_ONCE):
                lines = newest[start : start + _LINES_AT_ONCE]
                last_seq = max(last_seq, lines[-1].seq)
                if found := b"".join(filter(None, (_json_line(line, call) for line in lines))):
                    yield found
                await asyncio.sleep(0)  # let other tasks run
        if follow:
            async for message in streams.follow(self.bus, subjects.LOGS, subject, since_seq=last_seq + 1):
                if (line := _json_line(message, call)) is not None:
                    yield line

    async def calls(self, request: Request) -> Response:
        return await list_calls(request, self.submissions, self._function(request, READ).name)

    async def has_bundle(self, request: Request) -> Response:
        exists = await self.deploys.checks.has_bundle(digest_in(request, "the bundle"))
        return Response(status_code=200 if exists else 404)

    async def put_bundle(self, request: Request) -> Response:
        digest = digest_in(request, "the bundle")
        content_type = request.headers.get("content-type", "application/zip")
        if content_type.partition(";")[0].strip().lower() != "application/zip":
            raise UnsupportedMediaType("Send a bundle as application/zip.")
        await self.deploys.put_bundle(digest, await self.bundle_bodies.read(headers_of(request), request.receive))
        return json_response({"bundle": digest}, 201)

    def _function(self, request: Request, verb: str) -> Function:
        """Return the function in the path. Raises FunctionNotFound, Forbidden."""
        function = self._visible(request)
        principal_of(request).require_on(verb, function.name)
        return function

    def _visible(self, request: Request) -> Function:
        """Return the function in the path. Raises FunctionNotFound, also for a function that the client may not see."""
        path, principal = request.path_params["fn"], principal_of(request)
        if "(" in path:
            name = self.variants.find(path, principal)
        else:
            name = self.registry.find(path.partition(".")[0], principal)
        function = self.registry.function(name)
        name_object(request.scope, "fn", function.name)
        return function

    def _revision(self, request: Request, verb: str) -> Revision:
        """Return the revision in the path. Raises FunctionNotFound, RevisionNotFound, Forbidden."""
        requested = whole_number(request.path_params["number"], 9)
        name, principal = canonical(request.path_params["fn"]), principal_of(request)
        # A function that is built has no Function yet, so `find` comes second.
        if name not in self.registry.revisions or not principal.may_see(name):
            name = self.registry.find_or_deleted(request.path_params["fn"], principal)
        principal.require_on(verb, name)
        return self.registry.revision(name, -1 if requested is None else requested)

    def _status(self, function: Function, principal: Principal) -> FunctionStatus:
        """Return the controller's status of a function, or an empty one if it has not reported yet."""
        status = self.registry.status_for(principal, function.name)
        return status or FunctionStatus(function=function.name, serving=function.serving, workers=WorkerCounts())

    def _view(self, function: Function, principal: Principal, include_env: bool = False) -> dict[str, Any]:
        """Return a FunctionView (docs/http.md). Values that the controller has not reported are null."""
        status = self._status(function, principal)
        revision = self.registry.revisions.get(function.name, {}).get(function.active)
        return {
            "name": function.name,
            "active": function.active,
            "serving": function.serving,
            "latest": function.latest,
            "updated_at": function.updated_at,
            "min_workers": function.min_workers,
            "max_workers": function.max_workers,
            "spec": _spec_view(revision.spec, include_env) if revision else {},
            "env": list(revision.spec.env) if revision else [],
            **_status_view(status),
            "service_s": status.service_s,
            "cold_start_s": status.cold_start_s,
            "check": revision.check if revision else None,
            "source": revision.source if revision else None,
            "deployed_at": revision.created_at if revision else None,
            "lease": function.lease,
            "variant": _variant_view(revision) if revision else None,
            "traffic": _split_view(function.traffic),
        }


def _wants_env_values(request: Request) -> bool:
    """True for `?env=values`. Raises InvalidInput, or Forbidden for a key that may deploy no function."""
    requested = request.query_params.get("env", "names")
    if requested not in ("names", "values"):
        raise InvalidInput(f"env must be names or values, not {requested[:40]!r}", field="env")
    if requested == "values":
        principal_of(request).require_somewhere(DEPLOY)
    return requested == "values"


def _status_view(status: FunctionStatus) -> dict[str, Any]:
    fields = ("workers", "queued", "running", "wanted", "reason", "waiting", "last_start", "start_error", "next")
    return {name: getattr(status, name) for name in fields}


def _spec_view(spec: FunctionSpec, include_env: bool) -> dict[str, Any]:
    """Return a spec as JSON types, without `env` unless requested: its values may be secrets."""
    view: dict[str, Any] = msgspec.to_builtins(spec)
    if not include_env:
        del view["env"]
    return view


def _split_view(split: Split | None) -> dict[str, Any] | None:
    return None if split is None else {"weights": split.weights, "headers": split.headers, "mirror": split.mirror}


def _variant_view(revision: Revision) -> Variant | None:
    """Return a variant without the original spec, whose `env` may have secrets."""
    return None if revision.variant is None else msgspec.structs.replace(revision.variant, original=None)


def _revision_view(revision: Revision, function: Function | None) -> dict[str, Any]:
    return {
        "number": revision.number,
        "created_at": revision.created_at,
        "bundle": revision.bundle,
        "code": revision.code,
        "deploy_id": revision.deploy_id,
        "signed_by": revision.signature.key if revision.signature else "",
        "state": revision.state,
        "active": function is not None and revision.number == function.active,
        "serving": function is not None and revision.number == function.serving,
    }


def _json_line(message: StoredMessage, call: str) -> bytes | None:
    """Return a line of the log as JSON; None if it does not belong to `call` ("": to any call, or none)."""
    line = _log_line.decode(message.payload)
    return None if call and line.invocation != call else msgspec.json.encode(line) + b"\n"
