"""Routes of builds: start one without a function, follow it, read its report, cancel it."""

from __future__ import annotations

import itertools
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.devices.engine import Build
from gpufn_core.encoding import media
from gpufn_core.protocol import subjects
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import DEPLOY, READ
from gpufn_gateway.builds.artifacts import Artifacts
from gpufn_gateway.builds.builds import Builds, no_such_build
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import NewBuild
from gpufn_gateway.openapi.request_bounds import MAX_CHANGE, MAX_LISTED
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.requests import json_response, number, principal_of, read_json, route, wait_seconds
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store

# A report contains names from an uploaded model, so its page must not run or load anything.
_PAGE_HEADERS: Final = {
    "content-security-policy": (
        "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
}


class BuildRoutes:
    def __init__(self, *, bus: Bus, builds: Builds, artifacts: Artifacts, bodies: BodyReader) -> None:
        self._bus = bus
        self._builds = builds
        self._artifacts = artifacts
        self._bodies = bodies

    def routes(self) -> list[Route]:
        one = "/v1/builds/{id}"
        return [
            route("GET", "/v1/builds", self.index, READ, of_functions=True, scans=True),
            route("POST", "/v1/builds", self.begin, DEPLOY),
            route("GET", one, self.show, READ, of_functions=True),
            route("DELETE", one, self.cancel, DEPLOY, of_functions=True),
            route("GET", f"{one}/report", self.report, READ, of_functions=True),
            route("GET", f"{one}/report.html", self.page, READ, of_functions=True),
        ]

    async def index(self, request: Request) -> Response:
        limit = int(number(request, "limit", 100, 1, MAX_LISTED))
        principal = principal_of(request)
        visible = (build for build in self._builds.newest_first() if may_read(principal, build))
        views = [build_view(self._builds, build, principal) for build in itertools.islice(visible, limit)]
        return json_response({"builds": views})

    async def begin(self, request: Request) -> Response:
        body = await read_json(request, NewBuild, self._bodies)
        await self._artifacts.check_uploaded([body.model])
        build = await self._builds.begin(body.model, body.device)
        view = build_view(self._builds, build, principal_of(request))
        return json_response(view, 202, {"Location": f"/v1/builds/{build.id}"})

    async def show(self, request: Request) -> Response:
        """Show a build. `?wait=30` waits for a change after number `since` (`change` in the view; default: latest)."""
        build_id, wait_s, principal = request.path_params["id"], wait_seconds(request), principal_of(request)
        since = int(number(request, "since", self._builds.change(build_id), 0, MAX_CHANGE))
        await self._build(request, READ)
        build = await self._builds.changed(build_id, since, wait_s)
        return json_response(build_view(self._builds, build, principal))

    async def cancel(self, request: Request) -> Response:
        build = await self._builds.cancel((await self._build(request, DEPLOY)).id)
        return json_response(build_view(self._builds, build, principal_of(request)))

    async def report(self, request: Request) -> Response:
        return Response(await self._file(request, "report"), media_type=media.JSON)

    async def page(self, request: Request) -> Response:
        return Response(await self._file(request, "page"), headers=_PAGE_HEADERS, media_type="text/html")

    async def _file(self, request: Request, field: str) -> bytes:
        build = await self._build(request, READ)
        digest: str = getattr(build, field)
        if not digest:
            raise RouteError(404, f"The build {build.id} has no report: it is {build.state}.")
        return await object_store.get(self._bus, subjects.ENGINE_FILES, digest)

    async def _build(self, request: Request, verb: str) -> Build:
        """Return the build in the path. Raises BuildNotFound, Forbidden."""
        await self._builds.sync(request.path_params["id"])
        build = self._builds.get(request.path_params["id"])
        _check(principal_of(request), build, verb)
        return build


def may_read(principal: Principal, build: Build) -> bool:
    """Whether the principal may read a build: one of a function that it may read. A build without a function belongs to
    all functions."""
    return principal.may_read(build.function) if build.function else principal.has_scope(READ)


def _check(principal: Principal, build: Build, verb: str) -> None:
    """Raise BuildNotFound if the build does not exist for the principal, Forbidden if it lacks the verb."""
    if build.function:
        principal.require_visible(build.function, no_such_build(build.id))
        principal.require_on(verb, build.function)
    elif not may_read(principal, build):
        raise no_such_build(build.id)
    else:
        principal.require(verb)


def build_view(builds: Builds, build: Build, principal: Principal) -> dict[str, Any]:
    """Return a Build with its links, the build that it waits for, and the number of its last change, which grows. The
    principal may lack the right to read the build that it waits for; then only its time is shown."""
    url = f"/v1/builds/{build.id}"
    links = {"self": url}
    if build.report:
        links["report"] = f"{url}/report"
    if build.page:
        links["page"] = f"{url}/report.html"
    ahead = builds.ahead(build, lambda other: may_read(principal, other))
    more = {"ahead": ahead, "change": builds.change(build.id), "links": links}
    return {**msgspec.structs.asdict(build), **more}
