"""Routes of the shared memory extensions of the Open Inference Protocol. CUDA memory is not supported."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_gateway.auth.access import Access
from gpufn_gateway.auth.scopes import INVOKE
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.oip.shared_memory.regions import Regions
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.requests import json_response, principal_of, read_json, route

_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"


class _Registration(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


class SharedMemoryRoutes:
    """`regions` is None if the operator does not allow shared memory."""

    def __init__(self, regions: Regions | None, access: Access, bodies: BodyReader) -> None:
        self._regions = regions
        self._access = access
        self._bodies = bodies

    def routes(self) -> list[Route]:
        one = f"{_SYSTEM}/region/{{region}}"
        return [
            route("GET", f"{_SYSTEM}/status", self.status, INVOKE, of_functions=True),
            route("GET", f"{one}/status", self.status, INVOKE, of_functions=True),
            route("POST", f"{one}/register", self.register, INVOKE, of_functions=True),
            route("POST", f"{one}/unregister", self.unregister, INVOKE, of_functions=True),
            route("POST", f"{_SYSTEM}/unregister", self.unregister, INVOKE, of_functions=True),
            # Clients that use system memory send these two as well, before their first request.
            route("GET", f"{_CUDA}/status", self.no_cuda_regions),
            route("POST", f"{_CUDA}/unregister", self.no_cuda_regions),
        ]

    async def status(self, request: Request) -> Response:
        regions, owner = self._own(request)
        name = request.path_params.get("region")
        found = [regions.get(owner, name)] if name is not None else regions.all(owner).values()
        return json_response([region.view() for region in found])

    async def register(self, request: Request) -> Response:
        regions, owner = self._own(request)
        given = await read_json(request, _Registration, self._bodies)
        regions.register(owner, request.path_params["region"], given.key, given.offset, given.byte_size)
        return json_response({})

    async def unregister(self, request: Request) -> Response:
        regions, owner = self._own(request)
        regions.unregister(owner, request.path_params.get("region", ""))
        return json_response({})

    async def no_cuda_regions(self, request: Request) -> Response:
        empty: Any = [] if request.method == "GET" else {}
        return json_response(empty)

    def _own(self, request: Request) -> tuple[Regions, str]:
        """Return the regions, and the owner of the request's regions. Raises RouteError 501, Forbidden."""
        if self._regions is None:
            raise RouteError(501, "Shared memory is off at this gateway; GPUFN_SHARED_MEMORY_PREFIX allows it.")
        self._regions.check_client(request.scope.get("client"))
        return self._regions, self._access.sender_of(principal_of(request))
