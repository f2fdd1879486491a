"""Routes for operators: health, readiness, metrics, API keys, and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import Conflict, InvalidInput
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import ApiKey, KeyLimits
from gpufn_gateway.audit.request_audit import add_details
from gpufn_gateway.auth.access import Access, new_key, rotated
from gpufn_gateway.auth.key_use import KeyUse
from gpufn_gateway.auth.quotas import check as check_limits
from gpufn_gateway.auth.scopes import ADMIN, READ
from gpufn_gateway.buckets import decode_key
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.openapi import document
from gpufn_gateway.openapi.request_bodies import MAX_KEY_S, MIN_KEY_S, KeyRotation, NewKey
from gpufn_gateway.routes.requests import json_response, no_such_key, principal_of, read_json, route
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.process.clock import Clock

_LINKS = {"functions": "/v1/functions", "models": "/v2", "openapi": "/openapi.json", "ready": "/readyz"}


@dataclass(kw_only=True, eq=False)
class OperationRoutes:
    """Operator routes. `why_not_ready` returns the reason why calls cannot be served yet, or None."""

    registry: Registry
    telemetry: Telemetry
    access: Access
    keys: KeyValue
    key_use: KeyUse
    bodies: BodyReader
    clock: Clock
    why_not_ready: Callable[[], str | None]
    _removal_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def routes(self) -> list[Route]:
        return [
            route("GET", "/", self.about),
            route("GET", "/healthz", self.alive),
            route("GET", "/readyz", self.ready),
            route("GET", "/metrics", self.metrics, READ),
            route("GET", "/openapi.json", self.describe, READ, of_functions=True, scans=True),
            route("GET", "/v1/keys", self.list_keys, ADMIN),
            route("POST", "/v1/keys", self.create_key, ADMIN),
            route("DELETE", "/v1/keys/{id}", self.delete_key, ADMIN),
            route("POST", "/v1/keys/{id}/rotate", self.rotate_key, ADMIN),
            route("PUT", "/v1/keys/{id}/limits", self.replace_limits, ADMIN),
        ]

    async def about(self, request: Request) -> Response:
        return json_response({"name": "gpufn", "links": _LINKS})

    async def alive(self, request: Request) -> Response:
        return json_response({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        reason = self.why_not_ready()
        if reason is None:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready", "reason": reason}, 503)

    async def metrics(self, request: Request) -> Response:
        body, content_type = await self.telemetry.scrape(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def describe(self, request: Request) -> Response:
        revisions, principal = self.registry.revisions, principal_of(request)
        readable = [each for each in self.registry.functions.values() if principal.may_read(each.name)]
        serving = [revisions.get(each.name, {}).get(each.serving) for each in readable]
        present = [revision for revision in serving if revision is not None and revision.variant is None]
        # In a thread: the document of a thousand functions takes a second.
        return await asyncio.to_thread(_document, present, needs_key=bool(self.access.keys))

    async def list_keys(self, request: Request) -> Response:
        used = await self.key_use.last_used()
        views = [_key_view(key) | {"last_used_at": used.get(key.id)} for key in self.access.keys]
        return json_response({"keys": views})

    async def create_key(self, request: Request) -> Response:
        body = await read_json(request, NewKey, self.bodies)
        if body.team and self.access.teams.get(body.team) is None:
            raise InvalidInput(f"there is no team {body.team[:80]!r}: see `gpufn teams`", field="team")
        if body.expires_in_s is not None:
            _check_seconds(body.expires_in_s, "expires_in_s", least=MIN_KEY_S)
        key, secret = new_key(
            body.label, body.scopes, self.clock.time(), body.limits, body.expires_in_s, team=body.team
        )
        if not self.access.keys and ADMIN not in key.scopes:
            raise InvalidInput(
                "the first key needs the scope admin, without which no other key could be created: "
                "`gpufn keys create admin --scope admin`",
                field="scopes",
            )
        if not self.access.keys and key.expires_at is not None:
            raise InvalidInput(
                "the first key cannot expire: afterwards no other key could be created", field="expires_in_s"
            )
        add_details(request.scope, key=key.id, scopes=",".join(key.scopes), expires_at=key.expires_at)
        await self.keys.create(key.id, encode(key))
        return json_response(_key_view(key) | {"key": secret}, 201)

    async def rotate_key(self, request: Request) -> Response:
        """Replace the secret of a key. Its id, scopes, limits and usage stay."""
        key_id = request.path_params["id"]
        body = await read_json(request, KeyRotation, self.bodies)
        _check_seconds(body.overlap_s, "overlap_s", least=0)
        secret = ""

        def with_new_secret(stored: Entry | None) -> bytes:
            nonlocal secret
            if stored is None:
                raise no_such_key(key_id)
            key, secret = rotated(decode_key(stored.value), self.clock.time(), body.overlap_s)
            return encode(key)

        if all(key.id != key_id for key in self.access.keys):
            raise no_such_key(key_id)
        entry = await self.keys.change(key_id, with_new_secret)
        return json_response(_key_view(decode_key(entry.value)) | {"key": secret})

    async def replace_limits(self, request: Request) -> Response:
        """Replace all limits of a key."""
        key_id = request.path_params["id"]
        limits = await read_json(request, KeyLimits, self.bodies)
        check_limits(limits)
        add_details(request.scope, **msgspec.structs.asdict(limits))
        if all(key.id != key_id for key in self.access.keys):
            raise no_such_key(key_id)

        def with_limits(stored: Entry | None) -> bytes:
            if stored is None:
                raise no_such_key(key_id)
            return encode(msgspec.structs.replace(decode_key(stored.value), limits=limits))

        entry = await self.keys.change(key_id, with_limits)
        return json_response(_key_view(decode_key(entry.value)))

    async def delete_key(self, request: Request) -> Response:
        key_id = request.path_params["id"]
        async with self._removal_lock:  # if two requests remove the last two keys, the second is rejected
            if all(key.id != key_id for key in self.access.keys):
                raise no_such_key(key_id)
            self.access.check_remaining_keys([key for key in self.access.keys if key.id != key_id])
            stored = await self.keys.get(key_id)
            await self.keys.delete(key_id)
            await self.key_use.forget(key_id)
            await self._check_remaining(stored)
        return Response(status_code=204)

    async def _check_remaining(self, deleted: Entry | None) -> None:
        """Restore the deleted key if another gateway deleted the remaining keys at the same time. Raises Conflict."""
        try:
            self.access.check_remaining_keys([decode_key(entry.value) for entry in await self.keys.entries()])
        except Conflict:
            if deleted is not None:
                await self.keys.create(deleted.key, deleted.value)
            raise


def _document(revisions: list[Revision], *, needs_key: bool) -> Response:
    return json_response(document.document(revisions, needs_key=needs_key))


def _check_seconds(value: float, name: str, *, least: float) -> None:
    if not least <= value <= MAX_KEY_S:
        raise InvalidInput(f"{name} is a number of seconds from {least:g} to {MAX_KEY_S:,.0f}", field=name)


def _key_view(key: ApiKey) -> dict[str, object]:
    """Return a key without its digests."""
    replaced_until = None if key.replaced is None else key.replaced.valid_until
    return {
        "id": key.id,
        "label": key.label,
        "scopes": key.scopes,
        "created_at": key.created_at,
        "limits": key.limits,
        "team": key.team,
        "expires_at": key.expires_at,
        "replaced_until": replaced_until,
    }
