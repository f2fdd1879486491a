"""Routes of the history: series of functions, nodes and GPUs, and the time line of events."""

from __future__ import annotations

import datetime
import math
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.errors import InvalidInput, RevisionNotFound
from gpufn_core.spec.naming.names import shown
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.history import query
from gpufn_gateway.history.blocks import Event, EventKind
from gpufn_gateway.history.collector import function_subject, revision_subject
from gpufn_gateway.history.index import Index
from gpufn_gateway.history.recorder import Recorder
from gpufn_gateway.openapi.request_bounds import MAX_CHANGE, MAX_LISTED, NAMES
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.requests import json_response, number, principal_of, route, whole_number
from gpufn_platform.process.clock import Clock

_MAX_READ: Final = 5_000  # events that one request looks through


class HistoryRoutes:
    def __init__(self, recorder: Recorder, registry: Registry, clock: Clock) -> None:
        self._recorder = recorder
        self._registry = registry
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/history", self.history, READ, of_functions=True, scans=True),
            route("GET", "/v1/events", self.events, READ, of_functions=True, scans=True),
        ]

    async def history(self, request: Request) -> Response:
        principal, params = principal_of(request), request.query_params
        start, end = _time(request, "from"), _time(request, "to")
        step = number(request, "step", math.nan, 10, 366 * 86_400)
        span = query.span_of(start, end, None if math.isnan(step) else step, self._clock.time())
        series = _names(request, "series")
        asked = params.getlist("subject")
        query.check(asked, series, span)
        subjects = [self._subject(each, principal) for each in asked]
        known, found = await self._recorder.query(
            lambda index: (index.known(subjects), query.answer(subjects, series, span, index.read))
        )
        for subject in subjects:
            if subject not in known:
                self._check_exists(subject)
        return json_response(found)

    def _subject(self, text: str, principal: Principal) -> str:
        """Return the subject as it is stored. Raises Forbidden, InvalidInput, FunctionNotFound,
        RevisionNotFound."""
        kind = query.kind_of(text)
        if kind != "function":
            principal.require(READ)
            return text
        name, at, revision = text.partition(":")[2].partition("@")
        function = self._registry.find_or_deleted(name, principal)
        principal.require_on(READ, function)
        if not at:
            return function_subject(function)
        record = self._registry.functions.get(function)
        if record is not None and not 1 <= int(revision) <= record.latest:
            raise RevisionNotFound(f"{shown(function)} has no revision {revision}.")
        return revision_subject(function, int(revision))

    def _check_exists(self, subject: str) -> None:
        """Raises FunctionNotFound, RouteError for a subject that exists neither now nor in the history."""
        kind, _, name = subject.partition(":")
        if kind == "function":
            self._registry.function(name.partition("@")[0])
        nodes = self._registry.live_nodes()
        if kind == "node" and all(node.node != name for node in nodes):
            raise RouteError(404, f"There is no history of a node {name[:80]!r}: see `gpufn nodes`.")
        if kind == "gpu" and all(device.uuid != name for node in nodes for device in node.devices):
            raise RouteError(404, f"There is no history of a GPU {name[:80]!r}: see `gpufn nodes`.")

    async def events(self, request: Request) -> Response:
        """Return events, the newest first, with smaller numbers than `before`. `next` continues."""
        principal, params = principal_of(request), request.query_params
        limit = int(number(request, "limit", 100, 1, MAX_LISTED))
        before = whole_number(params.get("before", str(MAX_CHANGE)), 16)
        if not before or before > MAX_CHANGE:
            raise InvalidInput("`before` is the number of an event", field="before")
        since, until = _time(request, "from"), _time(request, "to")
        kinds = set(_names(request, "kind"))
        if unknown := kinds - set(EventKind):
            raise InvalidInput(
                f"{min(unknown)[:40]!r} is not a kind of event: use {', '.join(EventKind)}", field="kind"
            )
        subject = None if (asked := params.get("subject")) is None else self._subject(asked, principal)

        def is_wanted(event: Event) -> bool:
            return (
                (subject is None or event.subject == subject)
                and (not kinds or event.kind in kinds)
                and (since is None or event.at >= since)
                and (until is None or event.at <= until)
                and _may_read(event, principal)
            )

        def read(index: Index) -> tuple[list[tuple[int, Event]], int | None]:
            found: list[tuple[int, Event]] = []
            position, looked_at = before, 0
            while looked_at < _MAX_READ:
                page = index.events(position, 500)
                looked_at += len(page)
                for position, event in page:
                    if is_wanted(event):
                        found.append((position, event))
                        if len(found) == limit:
                            return found, position
                if not page or (since is not None and page[-1][1].at < since - 3600):
                    return found, None
            return found, position

        found, following = await self._recorder.query(read)
        views = [{"id": seq, **msgspec.to_builtins(event)} for seq, event in found]
        return json_response({"events": views, "next": following})


def _may_read(event: Event, principal: Principal) -> bool:
    kind, _, name = event.subject.partition(":")
    return principal.may_read(name) if kind == "function" else principal.has_scope(READ)


def _names(request: Request, name: str) -> list[str]:
    """Return comma-separated names. Raises InvalidInput."""
    text = request.query_params.get(name)
    if text is None:
        return []
    if NAMES.fullmatch(text) is None:
        raise InvalidInput(f"`{name}` has names with commas between them, not {text[:40]!r}", field=name)
    return text.split(",")


def _time(request: Request, name: str) -> float | None:
    """Return a time in unix seconds: a number, or RFC 3339. Raises InvalidInput."""
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        try:
            at = datetime.datetime.fromisoformat(text)
            value = at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp()
        except (ValueError, OverflowError):
            value = math.nan
    if not 0 <= value <= 2**40:
        raise InvalidInput(f"`{name}` is in unix seconds, or a time such as 2026-11-27T09:00:00Z", field=name)
    return value
