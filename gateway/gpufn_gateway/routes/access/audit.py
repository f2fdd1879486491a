"""Route of the audit log: its records by number."""

from __future__ import annotations

import math

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.auth.scopes import ADMIN
from gpufn_gateway.openapi.request_bounds import MAX_LISTED
from gpufn_gateway.routes.requests import json_response, number, route


class AuditRoutes:
    def __init__(self, log: AuditLog) -> None:
        self._log = log

    def routes(self) -> list[Route]:
        return [route("GET", "/v1/audit", self.index, ADMIN)]

    async def index(self, request: Request) -> Response:
        """Return records as stored, after the number `after`; with a negative one, the last so many. `head` is the last
        record."""
        limit = int(number(request, "limit", 100, 1, MAX_LISTED))
        after = int(number(request, "after", -limit, -MAX_LISTED, math.inf))
        head = await self._log.last()
        if after < 0:
            after = max(0, (0 if head is None else head.seq) + after)
        records = [msgspec.Raw(record) async for record in self._log.records(after, limit)]
        view = None if head is None else {"seq": head.seq, "hash": head.hash, "at": head.at}
        return json_response({"records": records, "head": view})
