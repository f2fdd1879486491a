"""Builds: begin one without a function, see how it goes, read its report, cancel it."""

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
from gpufn_gateway.openapi.request_bounds import LARGEST_CHANGE, MOST_LISTED
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.requests import json_answer, number, principal_of, read_json, seconds_to_wait
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store

# A report quotes names out of somebody's model: its page runs nothing and loads nothing, whatever they say.
_PAGE_HEADERS: Final = {
    "content-security-policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "x-content-type-options": "nosniff",
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
            Route("/v1/builds", self.index, methods=["GET"]),
            Route("/v1/builds", self.begin, methods=["POST"]),
            Route(one, self.show, methods=["GET"]),
            Route(one, self.cancel, methods=["DELETE"]),
            Route(f"{one}/report", self.report, methods=["GET"]),
            Route(f"{one}/report.html", self.page, methods=["GET"]),
        ]

    async def index(self, request: Request) -> Response:
        principal_of(request).need(READ)
        limit = int(number(request, "limit", 100, 1, MOST_LISTED))
        return json_answer({"builds": [build_view(self._builds, each) for each in self._builds.newest_first()[:limit]]})

    async def begin(self, request: Request) -> Response:
        principal_of(request).need(DEPLOY)
        wanted = await read_json(request, NewBuild, self._bodies)
        await self._artifacts.check_uploaded([wanted.model])
        build = await self._builds.begin(wanted.model, wanted.device)
        return json_answer(build_view(self._builds, build), 202, {"Location": f"/v1/builds/{build.id}"})

    async def show(self, request: Request) -> Response:
        """`?wait=30`: at the next change, after the one that `since` names (the view's `change`) or else from now."""
        principal_of(request).need(READ)
        build_id = request.path_params["id"]
        since = int(number(request, "since", self._builds.change(build_id), 0, LARGEST_CHANGE))
        return json_answer(
            build_view(self._builds, await self._builds.changed(build_id, since, seconds_to_wait(request)))
        )

    async def cancel(self, request: Request) -> Response:
        principal_of(request).need(DEPLOY)
        return json_answer(build_view(self._builds, await self._builds.cancel(request.path_params["id"])))

    async def report(self, request: Request) -> Response:
        return Response(await self._file(request, "report"), media_type=media.JSON)

    async def page(self, request: Request) -> Response:
        return Response(await self._file(request, "page"), headers=_PAGE_HEADERS, media_type="text/html")

    async def _file(self, request: Request, which: str) -> bytes:
        principal_of(request).need(READ)
        build = self._builds.get(request.path_params["id"])
        digest: str = getattr(build, which)
        if not digest:
            raise RouteError(404, f"The build {build.id} has no report: it is {build.state}.")
        return await object_store.get(self._bus, subjects.ENGINE_FILES, digest)


def build_view(builds: Builds, build: Build) -> dict[str, Any]:
    """A Build, where it is, and the number of its last change, which grows."""
    here = f"/v1/builds/{build.id}"
    links = {"self": here}
    if build.report:
        links["report"] = f"{here}/report"
    if build.page:
        links["page"] = f"{here}/report.html"
    return {**msgspec.structs.asdict(build), "change": builds.change(build.id), "links": links}
