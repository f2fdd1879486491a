"""Submitted calls: store a call and respond with 202; later serve its status, events and result, or cancel it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from gpufn_core.domain.invocation import END_REPORT_WITHIN_S, InvocationState
from gpufn_core.encoding import media
from gpufn_core.errors import InvalidInput, InvocationExpired, InvocationNotFound, QueueFull
from gpufn_core.ids import InvocationId, invocation_id_for, is_call_or_item_id, is_client_id, new_invocation_id
from gpufn_core.protocol.messages import CallLocation
from gpufn_core.protocol.records import CallRecord, Webhook
from gpufn_gateway import problems
from gpufn_gateway.auth.access import LOCAL, Principal
from gpufn_gateway.calls.arguments import ReadArguments
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.calls.prepared_call import PreparedCall
from gpufn_gateway.http.body_reader import Receive, Send, wait_for_disconnect
from gpufn_gateway.http.responses import (
    GPUFN_FORMAT,
    ResponseFormat,
    call_headers,
    send_parts,
    send_problem,
    send_result,
    timing,
)
from gpufn_gateway.openapi.request_bounds import MAX_IDEMPOTENCY_KEY_LENGTH
from gpufn_gateway.problems import Headers, KeyLimitExceeded
from gpufn_gateway.store_sync import StoreSync
from gpufn_gateway.submitted import call_events, call_views
from gpufn_gateway.submitted.call_indexing import CallIndexing
from gpufn_gateway.submitted.call_views import event_number
from gpufn_gateway.webhooks.address_policy import AddressPolicy, webhook_of
from gpufn_platform.bus.connection import Bus
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.records import call_records
from gpufn_platform.queue.records.call_index import Wanted
from gpufn_platform.queue.records.call_index_fill import SearchView
from gpufn_platform.queue.records.call_records import CallCursor
from gpufn_platform.queue.wakeups import WakeupSender

WEBHOOK: Final = b"x-gpufn-webhook"

_VIEWS_AT_ONCE: Final = 100
_SEARCH_S: Final = 0.3  # the search then returns the calls found so far


class Search(msgspec.Struct, frozen=True):
    """Which submitted calls to list, as in `call_records.search`: of a function (``*``: of all), in a state, of an API
    key, and made by another call."""

    function: str
    limit: int
    state: InvocationState | None = None
    since: float = 0.0
    until: float = math.inf
    key: str | None = None
    parent: str | None = None
    before: CallCursor | None = None

    @property
    def is_rare(self) -> bool:
        """Return whether only a small part of all calls matches."""
        return self.function != "*" or any(each is not None for each in (self.state, self.key, self.parent))

    @property
    def indexed(self) -> Wanted | None:
        """The filter for an index, or None if most calls match: then an index does not help."""
        if not self.is_rare and self.until == math.inf:
            return None
        function = None if self.function == "*" else self.function
        until = None if self.until == math.inf else self.until
        return Wanted(self.state, function, self.key, self.parent, until)

    def is_of(self, record: CallRecord) -> bool:
        return self.key in (None, record.owner) and self.parent in (None, record.parent)


class Submissions:
    def __init__(self, bus: Bus, calls: Calls, disk: StoreSync, addresses: AddressPolicy | None = None) -> None:
        self._bus = bus
        self._calls = calls
        self._disk = disk
        self._addresses = addresses or AddressPolicy()
        self._wakeup = WakeupSender(bus)
        self.indexing = CallIndexing(bus, calls.clock)

    async def submit(
        self,
        name: str,
        headers: dict[bytes, bytes],
        receive: Receive,
        send: Send,
        *,
        invocation: str | None = None,
        query: bytes = b"",
    ) -> None:
        """Respond with 202 once the call is stored. `invocation` is the client's own id; a repeat is the same call."""
        if invocation is not None and not is_client_id(invocation):
            raise InvalidInput(
                "an invocation id must be a ULID: 26 characters of 0-9 and a-z, the first 0 to 7", field="id"
            )
        call, record = await self.accept(name, headers, receive, invocation=invocation, query=query)
        await self._disk.sync_calls()
        body = msgspec.json.encode({"id": record.id, "state": record.state, "links": call_views.links(record.id)})
        response_headers = [
            (b"content-type", media.JSON.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"location", f"/v1/invocations/{record.id}".encode()),
            *_call_headers(record),
            *self._calls.limits(call),
        ]
        await send({"type": "http.response.start", "status": 202, "headers": response_headers})
        await send({"type": "http.response.body", "body": body})

    async def accept(
        self,
        name: str,
        headers: dict[bytes, bytes],
        receive: Receive,
        *,
        invocation: str | None = None,
        query: bytes = b"",
        read: ReadArguments | None = None,
        webhook_form: str = "",
        is_live: bool = False,
    ) -> tuple[PreparedCall, CallRecord]:
        """Store a call. Respond to the client after `StoreSync.sync_calls`. `webhook_form` is as in `Webhook`;
        `is_live` as in `CallRequest`."""
        call = await self._calls.prepare(
            name, headers, receive, waiting=False, is_queued=True, query=query, read=read, key=invocation or ""
        )
        try:
            key = headers.get(b"idempotency-key")
            client_id = invocation or id_of_key(call.target.name, call.principal, key)
            webhook = webhook_of(headers.get(WEBHOOK), call.principal.owner, self._addresses, webhook_form)
            record = await self._submit(call, client_id, call.submit_deadline, webhook, is_live=is_live)
            if self._calls.tracing is not None:
                self._calls.tracing.submitted(record, call.now)
            return call, record
        finally:
            self._calls.discard(call)

    async def _submit(
        self,
        call: PreparedCall,
        invocation: str | None,
        deadline: float,
        webhook: Webhook | None = None,
        *,
        is_live: bool = False,
    ) -> CallRecord:
        self._disk.check_room()
        try:
            async with self._calls.queueing(call.principal, call.target):
                return await self._store(call, invocation, deadline, webhook, is_live=is_live)
        except KeyLimitExceeded as error:
            if invocation is not None and await call_records.read(self._bus, invocation) is not None:
                return await self._store(call, invocation, deadline, webhook)  # a repeat: it is already in the queue
            self._calls.telemetry.of(call.target.name).count_refusal(error.code)
            raise

    async def _store(
        self,
        call: PreparedCall,
        invocation: str | None,
        deadline: float,
        webhook: Webhook | None,
        *,
        is_live: bool = False,
    ) -> CallRecord:
        if call.body.exceeds_message:
            invocation = invocation or new_invocation_id()  # needed first: the stored body belongs to this id
            call = await self._calls.store_body_for(call, invocation)
        try:
            return await call_records.submit(
                self._bus,
                call.request(deadline)._replace(is_live=is_live),
                now=call.now,
                invocation=invocation,
                webhook=webhook,
                sender=self._wakeup,
            )
        except QueueFull:
            raise self._calls.queue_full(call.target) from None

    async def invoke(
        self, name: str, headers: dict[bytes, bytes], receive: Receive, send: Send, query: bytes = b""
    ) -> None:
        """Invoke with an Idempotency-Key: store the call, wait for it, and respond like a plain invoke.

        The call goes on if the client disconnects. The client can repeat the request with the same key, or read the
        result by id.
        """
        # `waiting` is False because a repeated call may already have its outcome.
        call = await self._calls.prepare(name, headers, receive, waiting=False, is_queued=True, query=query)
        try:
            key = headers.get(b"idempotency-key")
            record = await self._submit(call, id_of_key(call.target.name, call.principal, key), call.deadline)
        finally:
            self._calls.discard(call)
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        outcome = asyncio.ensure_future(self._outcome(record.id, call.deadline - call.now + END_REPORT_WITHIN_S))
        try:
            await asyncio.wait({disconnect, outcome}, return_when=asyncio.FIRST_COMPLETED)
            if outcome.done():
                await self.send_outcome(*outcome.result(), send, self._calls.limits(call))
        finally:
            for task in (disconnect, outcome):
                task.cancel()
            await asyncio.gather(disconnect, outcome, return_exceptions=True)

    async def _outcome(self, invocation: str, wait_s: float) -> tuple[CallRecord, bytes]:
        record, body = await call_records.wait(self._bus, invocation, wait_s)
        if not record.state.ended:
            raise InvocationExpired(f"invocation {invocation} did not end before the deadline of this request")
        return record, body

    async def send_outcome(
        self,
        record: CallRecord,
        body: bytes,
        send: Send,
        extra_headers: Headers | None = None,
        *,
        is_head: bool = False,
        response_format: ResponseFormat = GPUFN_FORMAT,
    ) -> None:
        """Send the outcome of an ended call as an invoke would; `extra_headers` are added to it."""
        headers: Headers = [*(extra_headers or ()), *_call_headers(record)]
        if record.queue_s is not None and record.run_s is not None:
            headers += timing(record.queue_s, record.gather_s, record.run_s, record.gpu_s, record.cold_start)
        if record.state is not InvocationState.SUCCEEDED:
            await send_problem(send, response_format, problems.from_state(record.state, record.error), headers)
        elif record.blob:
            parts = call_records.blob_parts(self._bus, record)
            await send_parts(
                send, response_format, record.content_type, parts, headers, size=record.size, is_head=is_head
            )
        else:
            await send_result(send, response_format, record.content_type, body, headers)

    async def status(self, invocation: str, principal: Principal) -> dict[str, Any]:
        record, _ = await self._read(invocation, principal, allow_read_scope=True)
        return await self.view(record, principal)

    async def events(self, invocation: str, principal: Principal, last_seen: int) -> AsyncIterator[bytes] | None:
        """Return the events after `last_seen` as server-sent events; None if the call has ended and there are none."""
        record, _ = await self._read(invocation, principal, allow_read_scope=True)
        if record.state.ended and event_number(record.state, record.attempt) <= last_seen:
            return None
        return call_events.follow(self._bus, invocation, last_seen, lambda: self.status(invocation, principal))

    async def result(self, invocation: str, principal: Principal, wait_s: float) -> tuple[CallRecord, bytes]:
        """Wait up to `wait_s` for the call to end. Return its record, which may not have ended, and its result."""
        record, body = await self._read(invocation, principal)
        if record.state.ended or not wait_s:
            return record, body
        return await call_records.wait(self._bus, invocation, wait_s)

    async def cancel(self, invocation: str, principal: Principal) -> tuple[CallRecord, bool]:
        """Cancel a call. Return its record, and False if it had already ended.

        Repeating the request completes a cancellation that was interrupted.
        """
        record, _ = await self._read(invocation, principal)
        cancelled = False
        if record.state is InvocationState.CANCELLED:
            await call_records.cancel(self._bus, record, self._calls.clock.time())
        elif not record.state.ended:
            _, holder = await self._locate(record)
            running_record = call_views.as_running(record, holder)
            cancelled = await call_records.cancel(self._bus, running_record, self._calls.clock.time())
            if cancelled and self._calls.tracing is not None and running_record.state is InvocationState.QUEUED:
                self._calls.tracing.cancelled(record)
        updated = await call_records.read(self._bus, invocation)
        return (updated[0] if updated is not None else record), cancelled

    async def recent(self, function: str, limit: int, *, principal: Principal = LOCAL) -> list[dict[str, Any]]:
        """List the latest submitted calls of a function (``*``: of all that the principal may read), for clients that
        know no pages: among the last 100,000."""
        calls, _ = await self._search(Search(function, limit), principal, lambda: lambda: False, None)
        return calls

    async def search(self, wanted: Search, principal: Principal) -> tuple[list[dict[str, Any]], CallCursor | None]:
        """Return the calls that a search finds, and where it continues. After some tenths of a second it stops, so a
        page may have few calls, or none, and still have a next page."""
        view = None
        if (indexed := wanted.indexed) is not None:
            self.indexing.searched()
            view = SearchView(self.indexing.index, indexed)
        return await self._search(wanted, principal, self._search_budget, view)

    async def _search(
        self,
        wanted: Search,
        principal: Principal,
        budget: Callable[[], Callable[[], bool]],
        view: SearchView | None,
    ) -> tuple[list[dict[str, Any]], CallCursor | None]:
        ended_only = wanted.state is not None and wanted.state.ended

        async def found(holders: dict[str, CallLocation]) -> call_records.CallPage:
            def matches(record: CallRecord) -> bool:
                is_in_state = wanted.state in (None, call_views.as_running(record, holders.get(record.id)).state)
                return is_in_state and wanted.is_of(record) and principal.may_read(record.function)

            return await call_records.search(
                self._bus,
                wanted.function,
                wanted.limit,
                matches,
                since=wanted.since,
                until=wanted.until,
                ended_only=ended_only,
                before=wanted.before,
                budget=budget,
                is_rare=wanted.is_rare,
                index=view,
            )

        holders: dict[str, CallLocation] = {}
        if ended_only:
            page = await found(holders)
        elif wanted.state is None:  # any state matches: the runners answer meanwhile
            holders, page = await asyncio.gather(call_records.running_calls(self._bus), found({}))
        else:
            holders = await call_records.running_calls(self._bus)
            page = await found(holders)
        views: list[dict[str, Any]] = []
        for start in range(0, len(page.records), _VIEWS_AT_ONCE):
            chunk = page.records[start : start + _VIEWS_AT_ONCE]
            views += [self._list_view(record, holders.get(record.id), principal) for record in chunk]
            await asyncio.sleep(0)  # let other tasks run
        return views, page.before

    def _search_budget(self) -> Callable[[], bool]:
        """Return a function that reports whether the time of a search that begins now is over."""
        over_at = self._calls.clock.monotonic() + _SEARCH_S
        return lambda: self._calls.clock.monotonic() >= over_at

    async def queued(self, function: str, limit: int) -> list[str]:
        """Return the ids of the newest calls of a function that no runner holds."""
        holders = await call_records.running_calls(self._bus)

        def is_queued(record: CallRecord) -> bool:
            return call_views.as_running(record, holders.get(record.id)).state is InvocationState.QUEUED

        return [record.id for record in await call_records.recent(self._bus, function, limit, is_queued)]

    def _list_view(self, record: CallRecord, holder: CallLocation | None, principal: Principal) -> dict[str, Any]:
        """Like `view`, but without the place in the queue, which needs a request to the bus per call."""
        view = call_views.status(record, holder)
        if view["state"] is InvocationState.QUEUED:
            function = self._calls.registry.status_for(principal, record.function)
            view["waiting"] = call_views.wait_reason(record, function, self._calls.clock.time(), holder=holder)
        return view

    async def view(self, record: CallRecord, principal: Principal) -> dict[str, Any]:
        """Return the status of a call.

        The record is written when a call is queued, retried and ended. In between, the runner that holds it reports.
        """
        if record.state.ended:
            return call_views.status(record)
        place, holder = await self._locate(record)
        view = call_views.status(record, holder)
        if view["state"] is InvocationState.QUEUED:
            registry = self._calls.registry
            revision = registry.revisions.get(record.function, {}).get(record.revision)
            spec = None if revision is None else revision.spec
            now = self._calls.clock.time()
            view |= call_views.wait_fields(
                record, place, spec, registry.status_for(principal, record.function), now, holder=holder
            )
        return view

    async def _locate(self, record: CallRecord) -> tuple[int | None, CallLocation | None]:
        """Return the call's place in the queue, or its holder.

        It queries the runners only if the call is not in the queue: without a holder the request would time out.
        """
        place = await queue_position.position(self._bus, record)
        return place, None if place is not None else await call_records.locate(self._bus, record.id)

    async def _read(
        self, invocation: str, principal: Principal, *, allow_read_scope: bool = False
    ) -> tuple[CallRecord, bytes]:
        if not is_call_or_item_id(invocation):
            raise InvocationNotFound(f"{invocation[:40]!r} is not an invocation id: an id has 26 letters and digits.")
        stored = await call_records.read(self._bus, invocation)
        missing = InvocationNotFound(
            f"There is no invocation {invocation}; it may have been removed after its retention."
        )
        if stored is None:
            raise missing
        function = stored[0].function
        if not principal.may_see(function):
            await call_records.read_without_record(self._bus, invocation)  # takes as long as an unknown id
            raise missing
        (principal.require_invoke_or_read if allow_read_scope else principal.require_invoke)(function)
        return stored


def _call_headers(record: CallRecord) -> Headers:
    return call_headers(record.id, f"{record.function}@{record.revision}".encode())


def id_of_key(function: str, principal: Principal, idempotency_key: bytes | None) -> InvocationId | None:
    """Derive the invocation id from an Idempotency-Key; None without a key."""
    if idempotency_key is None:
        return None
    if not 0 < len(idempotency_key) <= MAX_IDEMPOTENCY_KEY_LENGTH:
        raise InvalidInput(
            f"an Idempotency-Key must have 1 to {MAX_IDEMPOTENCY_KEY_LENGTH} characters", field="Idempotency-Key"
        )
    return invocation_id_for(function, principal.id, idempotency_key.decode("latin-1"))
