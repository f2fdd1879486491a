"""Routes of builds: start one without a function, follow it, read its report, cancel it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.engine import Build
from gpufn_core.encoding import media
from gpufn_core.protocol import subjects
from gpufn_gateway.auth.access import DEPLOY, READ
from gpufn_gateway.builds.artifacts import Artifacts
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import NewBuild
from gpufn_gateway.openapi.request_bounds import MAX_CHANGE, MAX_LISTED
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.requests import json_response, number, read_json, route, wait_seconds
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
            route("GET", "/v1/builds", self.index, READ),
            route("POST", "/v1/builds", self.begin, DEPLOY),
            route("GET", one, self.show, READ),
            route("DELETE", one, self.cancel, DEPLOY),
            route("GET", f"{one}/report", self.report, READ),
            route("GET", f"{one}/report.html", self.page, READ),
        ]

    async def index(self, request: Request) -> Response:
        limit = int(number(request, "limit", 100, 1, MAX_LISTED))
        return json_response(
            {"builds": [build_view(self._builds, build) for build in self._builds.newest_first()[:limit]]}
        )

    async def begin(self, request: Request) -> Response:
        body = await read_json(request, NewBuild, self._bodies)
        await self._artifacts.check_uploaded([body.model])
        build = await self._builds.begin(body.model, body.device)
        return json_response(build_view(self._builds, build), 202, {"Location": f"/v1/builds/{build.id}"})

    async def show(self, request: Request) -> Response:
        """Show a build. `?wait=30` waits for a change after number `since` (`change` in the view; default: latest)."""
        build_id = request.path_params["id"]
        since = int(number(request, "since", self._builds.change(build_id), 0, MAX_CHANGE))
        return json_response(
            build_view(self._builds, await self._builds.changed(build_id, since, wait_seconds(request)))
        )

    async def cancel(self, request: Request) -> Response:
        return json_response(build_view(self._builds, await self._builds.cancel(request.path_params["id"])))

    async def report(self, request: Request) -> Response:
        return Response(await self._file(request, "report"), media_type=media.JSON)

    async def page(self, request: Request) -> Response:
        return Response(await self._file(request, "page"), headers=_PAGE_HEADERS, media_type="text/html")

    async def _file(self, request: Request, field: str) -> bytes:
        build = self._builds.get(request.path_params["id"])
        digest: str = getattr(build, field)
        if not digest:
            raise RouteError(404, f"The build {build.id} has no report: it is {build.state}.")
        return await object_store.get(self._bus, subjects.ENGINE_FILES, digest)


def build_view(builds: Builds, build: Build) -> dict[str, Any]:
    """Return a Build with its links, the build that it waits for, and the number of its last change, which grows."""
    url = f"/v1/builds/{build.id}"
    links = {"self": url}
    if build.report:
        links["report"] = f"{url}/report"
    if build.page:
        links["page"] = f"{url}/report.html"
    more = {"ahead": builds.ahead(build), "change": builds.change(build.id), "links": links}
    return {**msgspec.structs.asdict(build), **more}
