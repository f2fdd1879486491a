"""Routes of queues and dicts. Their names have the form of functions' names: `invoke` uses them, `read` lists them,
`deploy` deletes them. A value is the body of a request, with its content type."""

from __future__ import annotations

import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpufn_core.encoding import media
from gpufn_core.errors import Conflict, DataNotFound, InvalidInput
from gpufn_core.protocol import subjects
from gpufn_core.protocol.data import (
    MAX_DELIVERIES,
    MAX_ITEMS,
    MAX_S,
    MIN_S,
    VALUE_BYTES,
    WAIT_S,
    StoredValue,
    value_tag,
)
from gpufn_core.protocol.records import BodyReference
from gpufn_gateway.auth.scopes import DEPLOY, INVOKE, READ
from gpufn_gateway.auth.team_account import team_of
from gpufn_gateway.data.dicts import no_such_dict
from gpufn_gateway.data.operations import Operations
from gpufn_gateway.data.queues import no_such_queue
from gpufn_gateway.http import sender
from gpufn_gateway.http.body_reader import BodyReader, iter_body, require_content_length
from gpufn_gateway.routes.requests import (
    StreamedResponse,
    flag,
    headers_of,
    json_response,
    number,
    principal_of,
    route,
)
from gpufn_gateway.routes.volumes import full_name_in
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.queue import large_bodies

_QUEUE = "/v1/queues/{queue:name}"
_DICT = "/v1/dicts/{dict:name}"
_DEFAULT_LEASE_S = 60.0
_DEFAULT_TTL_S = 3600.0  # until a stored value expires


class KeyExists(Conflict):
    """A dict has an entry that was to be new."""

    retryable = False


class DataRoutes:
    def __init__(self, bus: Bus, operations: Operations, bodies: BodyReader) -> None:
        self._bus = bus
        self._storage = operations.storage
        self._queues = operations.queues
        self._dicts = operations.dicts
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/queues", self.list_queues, READ, of_functions=True, scans=True),
            route("POST", f"{_QUEUE}/items", self.put_item),
            route("POST", f"{_QUEUE}/lease", self.lease_item),
            route("POST", f"{_QUEUE}/ack", self.ack_item),
            route("POST", f"{_QUEUE}/release", self.release_item),
            route("GET", _QUEUE, self.count_items),
            route("DELETE", _QUEUE, self.delete_queue, DEPLOY, of_functions=True),
            route("POST", "/v1/values", self.put_value, INVOKE, of_functions=True),
            route("GET", "/v1/values/{id}", self.get_value, INVOKE, of_functions=True),
            route("GET", "/v1/dicts", self.list_dicts, READ, of_functions=True, scans=True),
            route("GET", f"{_DICT}/keys", self.list_keys, scans=True),
            route("GET", f"{_DICT}/entry", self.get_entry),
            route("PUT", f"{_DICT}/entry", self.set_entry),
            route("DELETE", f"{_DICT}/entry", self.delete_entry),
            route("DELETE", _DICT, self.clear_dict, DEPLOY, of_functions=True),
        ]

    # --- queues ------------------------------------------------------------------------------------------------------

    async def list_queues(self, request: Request) -> Response:
        return _list(request, "queues", "items", await self._queues.all())

    async def count_items(self, request: Request) -> Response:
        name = _queue(request, INVOKE)
        return json_response({"name": name, "items": await self._queues.size(name)})

    async def put_item(self, request: Request) -> Response:
        name = _queue(request, INVOKE)
        limit = number(request, "max_items", MAX_ITEMS, 1, MAX_ITEMS)
        ttl_s = _seconds(request, "ttl")
        value = await self._bodies.read(headers_of(request), request.receive)
        id_ = request.query_params.get("id", "")[:64]
        await self._storage.admit_item(name, len(value))
        await self._queues.put(name, _type(request), value, ttl_s=ttl_s, max_items=int(limit), id_=id_)
        return Response(status_code=201)

    async def lease_item(self, request: Request) -> Response:
        """Lease the first item, after a wait (`?wait=20`). Responds with 204 if none came."""
        name = _queue(request, INVOKE)
        wait_s = number(request, "wait", 0.0, 0.0, WAIT_S)
        lease_s = _seconds(request, "lease") or _DEFAULT_LEASE_S
        limit = int(number(request, "max_deliveries", 0, 1, MAX_DELIVERIES)) or None
        item = await self._queues.get(name, wait_s=wait_s, lease_s=lease_s, max_deliveries=limit)
        if item is None:
            return Response(status_code=204)
        headers = {"x-gpufn-lease": item.lease, "x-gpufn-deliveries": str(item.deliveries)}
        return Response(item.value, headers=headers, media_type=item.content_type or media.BYTES)

    async def ack_item(self, request: Request) -> Response:
        return await self._settle(request, is_done=True)

    async def release_item(self, request: Request) -> Response:
        return await self._settle(request, is_done=False)

    async def _settle(self, request: Request, *, is_done: bool) -> Response:
        name = _queue(request, INVOKE)
        await self._queues.settle(name, request.query_params.get("lease", ""), is_done=is_done)
        return Response(status_code=204)

    async def delete_queue(self, request: Request) -> Response:
        await self._queues.remove(_queue(request, DEPLOY))
        return Response(status_code=204)

    # --- values ------------------------------------------------------------------------------------------------------

    async def put_value(self, request: Request) -> Response:
        """Store the body, for an hour by default. Its id cannot be guessed, and is all that a reader needs."""
        ttl_s = _seconds(request, "ttl") or _DEFAULT_TTL_S
        size = require_content_length(headers_of(request), VALUE_BYTES, "a stored value")
        team = team_of(sender.current.get())
        await self._storage.admit_for(team, size)
        owner = large_bodies.expiring_owner(value_tag(team))
        async with contextlib.aclosing(iter_body(request.receive)) as parts:
            stored = await object_store.keep_stream(self._bus, subjects.VALUES, size, parts, owner=owner, ttl_s=ttl_s)
        return json_response(StoredValue.of(BodyReference(owner, stored, size)), 201)

    async def get_value(self, request: Request) -> ASGIApp:
        """Send the value as it arrives. A damaged value breaks off."""
        id_ = str(request.path_params["id"])
        reference = StoredValue(id_, 0).reference
        size = await object_store.size_of(self._bus, subjects.VALUES, reference.digest, owner=reference.owner)
        if size is None:
            raise DataNotFound(f"There is no value {id_[:100]!r}: it may have expired.")
        headers = [(b"content-type", media.BYTES.encode()), (b"content-length", b"%d" % size)]
        return StreamedResponse(headers, large_bodies.read(self._bus, subjects.VALUES, reference))

    # --- dicts -------------------------------------------------------------------------------------------------------

    async def list_dicts(self, request: Request) -> Response:
        return _list(request, "dicts", "entries", await self._dicts.all())

    async def list_keys(self, request: Request) -> Response:
        name = _dict(request, INVOKE)
        return json_response({"keys": await self._dicts.keys(name)})

    async def get_entry(self, request: Request) -> Response:
        name, key = _dict(request, INVOKE), _key(request)
        found = await self._dicts.get(name, key)
        if found is None:
            raise DataNotFound(f"{name} has no key {key[:100]!r}.")
        return Response(found[1], media_type=found[0] or media.BYTES)

    async def set_entry(self, request: Request) -> Response:
        """Store a value. With `?only_new=true`, responds with 409 if the key exists."""
        name, key, only_new = _dict(request, INVOKE), _key(request), flag(request, "only_new")
        ttl_s = _seconds(request, "ttl")
        value = await self._bodies.read(headers_of(request), request.receive)
        await self._storage.admit(name, len(value))
        is_set = await self._dicts.set(name, key, _type(request), value, ttl_s=ttl_s, only_new=only_new)
        if not is_set:
            raise KeyExists(f"{name} has the key {key[:100]!r} already.")
        return Response(status_code=204)

    async def delete_entry(self, request: Request) -> Response:
        name, key = _dict(request, INVOKE), _key(request)
        if not await self._dicts.remove(name, key):
            raise DataNotFound(f"{name} has no key {key[:100]!r}.")
        return Response(status_code=204)

    async def clear_dict(self, request: Request) -> Response:
        await self._dicts.clear(_dict(request, DEPLOY))
        return Response(status_code=204)


def _list(request: Request, kind: str, what: str, counts: dict[str, int]) -> Response:
    principal = principal_of(request)
    return json_response(
        {kind: [{"name": name, what: count} for name, count in counts.items() if principal.may_read(name)]}
    )


def _queue(request: Request, verb: str) -> str:
    return full_name_in(request, "queue", verb, no_such_queue)


def _dict(request: Request, verb: str) -> str:
    return full_name_in(request, "dict", verb, no_such_dict)


def _key(request: Request) -> str:
    key = request.query_params.get("key")
    if not key:
        raise InvalidInput("name the key: ?key=...", field="key")
    return key


def _seconds(request: Request, name: str) -> float | None:
    return number(request, name, 0.0, MIN_S, MAX_S) if name in request.query_params else None


def _type(request: Request) -> str:
    return headers_of(request).get(b"content-type", b"").decode("latin-1")[:200]
