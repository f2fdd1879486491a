"""What operators ask: alive, ready, numbers, nodes, keys, and the description of it all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.device_metrics import DeviceMetrics
from gpufn_core.errors import Conflict, InvalidInput
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import ApiKey, KeyLimits
from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway import telemetry
from gpufn_gateway.auth.access import ADMIN, READ, Access, new_key
from gpufn_gateway.auth.quotas import check as check_limits
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi import document
from gpufn_gateway.openapi.request_bodies import NewKey
from gpufn_gateway.routes.requests import json_answer, no_such_key, principal_of, read_json
from gpufn_gateway.telemetry import Telemetry
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.process.clock import Clock

_api_key = msgspec.msgpack.Decoder(ApiKey)
_LINKS = {"functions": "/v1/functions", "models": "/v2", "openapi": "/openapi.json", "ready": "/readyz"}


class _Node(NodeReport, frozen=True):
    """With how its GPUs are."""

    metrics: tuple[DeviceMetrics, ...] = ()


class OperationRoutes:
    """`why_not_ready` says what is missing until a call would be served, or None."""

    def __init__(
        self,
        *,
        registry: Registry,
        counters: Telemetry,
        access: Access,
        keys: KeyValue,
        bodies: BodyReader,
        clock: Clock,
        why_not_ready: Callable[[], str | None],
    ) -> None:
        self._registry = registry
        self._telemetry = counters
        self._access = access
        self._keys = keys
        self._bodies = bodies
        self._clock = clock
        self._why_not_ready = why_not_ready
        self._removing = asyncio.Lock()  # of two who remove the last two keys, the second is refused

    def routes(self) -> list[Route]:
        return [
            Route("/", self.about, methods=["GET"]),
            Route("/healthz", self.alive, methods=["GET"]),
            Route("/readyz", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/openapi.json", self.describe, methods=["GET"]),
            Route("/v1/nodes", self.nodes, methods=["GET"]),
            Route("/v1/keys", self.list_keys, methods=["GET"]),
            Route("/v1/keys", self.create_key, methods=["POST"]),
            Route("/v1/keys/{id}", self.delete_key, methods=["DELETE"]),
            Route("/v1/keys/{id}/limits", self.limit_key, methods=["PUT"]),
        ]

    async def about(self, request: Request) -> Response:
        return json_answer({"name": "gpufn", "links": _LINKS})

    async def alive(self, request: Request) -> Response:
        return json_answer({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        reason = self._why_not_ready()
        if reason is None:
            return json_answer({"status": "ready"})
        return json_answer({"status": "not ready", "reason": reason}, 503)

    async def metrics(self, request: Request) -> Response:
        principal_of(request).need(READ)
        text = self._telemetry.exposition() + self._registry.device_reports.exposition()
        return Response(text, media_type=telemetry.CONTENT_TYPE)

    async def describe(self, request: Request) -> Response:
        principal_of(request).need(READ)
        known = self._registry.revisions
        serving = [known.get(each.name, {}).get(each.serving) for each in self._registry.functions.values()]
        present = [revision for revision in serving if revision is not None]
        return json_answer(document.document(present, needs_key=bool(self._access.keys)))

    async def nodes(self, request: Request) -> Response:
        principal_of(request).need(READ)
        nodes = [
            _Node(**msgspec.structs.asdict(report), metrics=self._registry.device_reports.of(report.node))
            for report in self._registry.live_nodes()
        ]
        return json_answer({"nodes": nodes})

    async def list_keys(self, request: Request) -> Response:
        principal_of(request).need(ADMIN)
        return json_answer({"keys": [_shown(key) for key in self._access.keys]})

    async def create_key(self, request: Request) -> Response:
        principal_of(request).need(ADMIN)
        wanted = await read_json(request, NewKey, self._bodies)
        key, secret = new_key(wanted.label, wanted.scopes, self._clock.time(), wanted.limits)
        if not self._access.keys and ADMIN not in key.scopes:
            raise InvalidInput(
                "the first key needs the scope admin: without one nobody could make another", field="scopes"
            )
        await self._keys.create(key.id, encode(key))
        return json_answer(_shown(key) | {"key": secret}, 201)

    async def limit_key(self, request: Request) -> Response:
        """In place of the limits that it has."""
        principal_of(request).need(ADMIN)
        key_id = request.path_params["id"]
        limits = await read_json(request, KeyLimits, self._bodies)
        check_limits(limits)
        if all(key.id != key_id for key in self._access.keys):
            raise no_such_key()

        def limited(stored: Entry | None) -> bytes:
            if stored is None:
                raise no_such_key()
            return encode(msgspec.structs.replace(_api_key.decode(stored.value), limits=limits))

        entry = await self._keys.change(key_id, limited)
        return json_answer(_shown(_api_key.decode(entry.value)))

    async def delete_key(self, request: Request) -> Response:
        principal_of(request).need(ADMIN)
        key_id = request.path_params["id"]
        async with self._removing:
            if all(key.id != key_id for key in self._access.keys):
                raise no_such_key()
            self._access.check_removal(key_id)
            stored = await self._keys.get(key_id)
            await self._keys.delete(key_id)
            await self._check_left(stored)
        return Response(status_code=204)

    async def _check_left(self, deleted: Entry | None) -> None:
        """At another gateway somebody may have deleted the others in this moment: whoever sees it takes his word back.
        Raises Conflict."""
        try:
            self._access.check_left([_api_key.decode(entry.value) for entry in await self._keys.entries()])
        except Conflict:
            if deleted is not None:
                await self._keys.create(deleted.key, deleted.value)
            raise


def _shown(key: ApiKey) -> dict[str, object]:
    return {
        "id": key.id,
        "label": key.label,
        "scopes": key.scopes,
        "created_at": key.created_at,
        "limits": key.limits,
    }
