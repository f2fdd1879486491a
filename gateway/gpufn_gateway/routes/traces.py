"""Routes of the traces that this gateway keeps in memory."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.errors import TraceNotFound
from gpufn_core.protocol.spans import Span
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.openapi.request_bounds import MAX_LISTED
from gpufn_gateway.routes.requests import json_response, number, principal_of, route
from gpufn_gateway.traces.store import TraceStore


class TraceRoutes:
    """`store` is None if calls are not traced."""

    def __init__(self, store: TraceStore | None, registry: Registry) -> None:
        self._store = store
        self._registry = registry

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/traces", self.list, READ, of_functions=True, scans=True),
            route("GET", "/v1/traces/{id}", self.one, READ, of_functions=True, scans=True),
        ]

    async def list(self, request: Request) -> Response:
        """List traces, newest first: of a function, or of all that the key may read."""
        principal = principal_of(request)
        limit = int(number(request, "limit", 100, 1, MAX_LISTED))
        is_wanted: Callable[[str], bool] = principal.may_read
        if (name := request.query_params.get("function")) is not None:
            wanted = self._registry.find_or_deleted(name, principal)
            principal.require_on(READ, wanted)
            is_wanted = functools.partial(operator.eq, wanted)
        found = [] if self._store is None else itertools.islice(self._store.recent(is_wanted), limit)
        return json_response({"enabled": self._store is not None, "traces": [*found]})

    async def one(self, request: Request) -> Response:
        """Return the spans of a trace, by its id or by the id of a call in it."""
        asked = str(request.path_params["id"]).lower()
        if self._store is None:
            raise TraceNotFound("Calls are not traced: set GPUFN_TRACES_RATIO for the gateway.")
        trace = self._store.find(asked)
        spans = [] if trace is None else self._store.spans(trace, principal_of(request).may_read)
        if trace is None or not spans:
            raise TraceNotFound(
                f"There is no trace, and no traced call, with the id {asked[:80]!r}: it was not sampled, or newer "
                "traces have taken its place."
            )
        return json_response({"id": trace, "spans": [*map(_view, spans)], "left_out": self._store.left_out(trace)})


def _view(span: Span) -> dict[str, object]:
    link = None if span.link is None else {"trace": span.link[0], "span": span.link[1]}
    error = None if span.error is None else {"code": span.error.code, "message": span.error.message}
    view = msgspec.structs.asdict(span)
    del view["trace"]
    return view | {"parent": span.parent or None, "error": error, "link": link}
