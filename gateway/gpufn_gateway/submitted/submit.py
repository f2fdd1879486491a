"""Calls that nobody waits for: stored, then 202; later their status, their result, or their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from gpufn_core.domain.invocation import WORD_WITHIN_S, InvocationState
from gpufn_core.encoding import media
from gpufn_core.errors import InvalidInput, InvocationExpired, InvocationNotFound, QueueFull
from gpufn_core.ids import InvocationId, invocation_id_for, is_invocation_id, names_invocation, new_invocation_id
from gpufn_core.protocol.messages import HeldBy
from gpufn_core.protocol.records import CallRecord, Webhook
from gpufn_gateway import problems
from gpufn_gateway.auth.access import READ, Principal
from gpufn_gateway.calls.prepare import Calls, PreparedCall
from gpufn_gateway.http.body_reader import Receive, Send, left
from gpufn_gateway.http.responses import OWN, call_headers, send_parts, send_problem, send_result, timing
from gpufn_gateway.openapi.request_bounds import LONGEST_IDEMPOTENCY_KEY
from gpufn_gateway.problems import Headers, Limited
from gpufn_gateway.store_sync import StoreSync
from gpufn_gateway.submitted import call_events, call_views
from gpufn_gateway.submitted.call_views import event_number
from gpufn_gateway.webhooks.address_policy import Addresses, webhook_of
from gpufn_platform.bus.connection import Bus
from gpufn_platform.queue import call_records, queue_position
from gpufn_platform.queue.wakeups import Ringer

WEBHOOK: Final = b"x-gpufn-webhook"


class Submissions:
    def __init__(self, bus: Bus, calls: Calls, disk: StoreSync, addresses: Addresses | None = None) -> None:
        self._bus = bus
        self._calls = calls
        self._disk = disk
        self._addresses = addresses or Addresses()
        self._ringer = Ringer(bus)

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
        """Answer 202 once the call is stored. `invocation` is the client's own id: known already, it is that call."""
        if invocation is not None and not is_invocation_id(invocation):
            raise InvalidInput("an invocation's id is a ULID: 26 characters of 0-9 and a-z", field="id")
        call = await self._calls.prepare(name, headers, receive, waits=False, is_queued=True, query=query)
        try:
            key = headers.get(b"idempotency-key")
            own = invocation or id_of_key(call.target.name, call.principal, key)
            webhook = webhook_of(headers.get(WEBHOOK), call.principal.owner, self._addresses)
            record = await self._submit(call, own, call.submit_deadline, webhook)
        finally:
            self._calls.discard(call)
        await self._disk.accepted()
        body = msgspec.json.encode({"id": record.id, "state": record.state, "links": call_views.links(record.id)})
        answer = [
            (b"content-type", media.JSON.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"location", f"/v1/invocations/{record.id}".encode()),
            *_headers_of(record),
            *self._calls.limits(call),
        ]
        await send({"type": "http.response.start", "status": 202, "headers": answer})
        await send({"type": "http.response.body", "body": body})

    async def _submit(
        self, call: PreparedCall, invocation: str | None, deadline: float, webhook: Webhook | None = None
    ) -> CallRecord:
        self._disk.check_room()
        try:
            async with self._calls.queueing(call):
                return await self._store(call, invocation, deadline, webhook)
        except Limited as error:
            if invocation is not None and await call_records.read(self._bus, invocation) is not None:
                return await self._store(call, invocation, deadline, webhook)  # it is there, and takes no place more
            self._calls.telemetry.of(call.target.name).refused(error.code)
            raise

    async def _store(
        self, call: PreparedCall, invocation: str | None, deadline: float, webhook: Webhook | None
    ) -> CallRecord:
        if call.by_reference:
            invocation = invocation or new_invocation_id()  # it owns the body, so it must be known before
            call = await self._calls.stored_for(call, invocation)
        try:
            return await call_records.submit(
                self._bus,
                call.request(deadline),
                now=call.now,
                invocation=invocation,
                webhook=webhook,
                ringer=self._ringer,
            )
        except QueueFull:
            raise self._calls.queue_full(call.target) from None

    async def invoke(
        self, name: str, headers: dict[bytes, bytes], receive: Receive, send: Send, query: bytes = b""
    ) -> None:
        """Answer as an invoke would, of a call that is kept: it goes on when its client leaves, who may come again with
        the same Idempotency-Key, or fetch its outcome by id."""
        # It may have an outcome already.
        call = await self._calls.prepare(name, headers, receive, waits=False, is_queued=True, query=query)
        try:
            key = headers.get(b"idempotency-key")
            record = await self._submit(call, id_of_key(call.target.name, call.principal, key), call.deadline)
        finally:
            self._calls.discard(call)
        client = asyncio.ensure_future(left(receive))
        waiting = asyncio.ensure_future(self._outcome(record.id, call.deadline - call.now + WORD_WITHIN_S))
        try:
            await asyncio.wait({client, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                await self.send_outcome(*waiting.result(), send, self._calls.limits(call))
        finally:
            for task in (client, waiting):
                task.cancel()
            await asyncio.gather(client, waiting, return_exceptions=True)

    async def _outcome(self, invocation: str, wait_s: float) -> tuple[CallRecord, bytes]:
        record, body = await call_records.wait(self._bus, invocation, wait_s)
        if not record.state.ended:
            raise InvocationExpired(f"invocation {invocation} did not end before the deadline of this request")
        return record, body

    async def send_outcome(
        self, record: CallRecord, body: bytes, send: Send, about: Headers | None = None, *, is_head: bool = False
    ) -> None:
        """The answer that an invoke would have given, of a call that has ended; with the fields `about` it."""
        headers: Headers = [*(about or ()), *_headers_of(record)]
        if record.queue_s is not None and record.run_s is not None:
            headers += timing(record.queue_s, record.gather_s, record.run_s, record.gpu_s, record.cold_start)
        if record.state is not InvocationState.SUCCEEDED:
            await send_problem(send, OWN, problems.from_state(record.state, record.error), headers)
        elif record.blob:
            parts = call_records.blob_parts(self._bus, record)
            await send_parts(send, OWN, record.content_type, parts, headers, size=record.size, is_head=is_head)
        else:
            await send_result(send, OWN, record.content_type, body, headers)

    async def status(self, invocation: str, principal: Principal) -> dict[str, Any]:
        record, _ = await self._read(invocation, principal, may_read=True)
        return await self.view(record)

    async def events(self, invocation: str, principal: Principal, seen: int) -> AsyncIterator[bytes] | None:
        """What happens to it from now on, as server-sent events; None when it has ended and that was `seen`."""
        record, _ = await self._read(invocation, principal, may_read=True)
        if record.state.ended and event_number(record.state, record.attempt) <= seen:
            return None
        return call_events.follow(self._bus, invocation, seen, lambda: self.status(invocation, principal))

    async def result(self, invocation: str, principal: Principal, wait_s: float) -> tuple[CallRecord, bytes]:
        """The record, ended or, after `wait_s`, not; and its result."""
        record, body = await self._read(invocation, principal)
        if record.state.ended or not wait_s:
            return record, body
        return await call_records.wait(self._bus, invocation, wait_s)

    async def cancel(self, invocation: str, principal: Principal) -> tuple[CallRecord, bool]:
        """The record as it is then; False when it had ended already. Asked for again, it does what is left to do."""
        record, _ = await self._read(invocation, principal)
        cancelled = False
        if record.state is InvocationState.CANCELLED:
            await call_records.cancel(self._bus, record, self._calls.clock.time())
        elif not record.state.ended:
            _, held = await self._whereabouts(record)
            ran = call_views.running(record, held)
            cancelled = await call_records.cancel(self._bus, ran, self._calls.clock.time())
        found = await call_records.read(self._bus, invocation)
        return (found[0] if found is not None else record), cancelled

    async def recent(
        self, function: str, limit: int, state: InvocationState | None = None, since: float = 0.0
    ) -> list[dict[str, Any]]:
        """The last submitted calls of a function (``*``: of all) that are in `state`, newest first. `since` in unix
        seconds."""
        ended_only = state is not None and state.ended
        held = {} if ended_only else await call_records.held(self._bus)

        def matches(record: CallRecord) -> bool:
            return state in (None, call_views.running(record, held.get(record.id)).state)

        found = await call_records.recent(self._bus, function, limit, matches, since=since, ended_only=ended_only)
        return [self._listed(record, held.get(record.id)) for record in found]

    def _listed(self, record: CallRecord, held: HeldBy | None) -> dict[str, Any]:
        """As `view`, without its place in the queue, which takes a look of its own for each."""
        view = call_views.status(record, held)
        if view["state"] is InvocationState.QUEUED:
            function = self._calls.registry.status(record.function)
            view["waiting"] = call_views.why_it_waits(record, function, self._calls.clock.time(), held=held)
        return view

    async def view(self, record: CallRecord) -> dict[str, Any]:
        """The status. A record is written when a call is queued, tried again, and ends; in between the runners say who
        runs it."""
        if record.state.ended:
            return call_views.status(record)
        place, held = await self._whereabouts(record)
        view = call_views.status(record, held)
        if view["state"] is InvocationState.QUEUED:
            registry = self._calls.registry
            revision = registry.revisions.get(record.function, {}).get(record.revision)
            spec = None if revision is None else revision.spec
            now = self._calls.clock.time()
            view |= call_views.waits(record, place, spec, registry.status(record.function), now, held=held)
        return view

    async def _whereabouts(self, record: CallRecord) -> tuple[int | None, HeldBy | None]:
        """Its place in the queue, or who has it. Who asks for one that nobody has waits for an answer in vain."""
        place = await queue_position.place(self._bus, record)
        return place, None if place is not None else await call_records.where(self._bus, record.id)

    async def _read(self, invocation: str, principal: Principal, *, may_read: bool = False) -> tuple[CallRecord, bytes]:
        if not names_invocation(invocation):
            raise InvocationNotFound(f"{invocation[:40]!r} is not an invocation's id, which has 26 letters and digits.")
        found = await call_records.read(self._bus, invocation)
        if found is None:
            missing = f"There is no invocation {invocation}; it may have been removed after its retention."
            raise InvocationNotFound(missing)
        if not (may_read and principal.may(READ)):
            principal.need_invoke(found[0].function)
        return found


def _headers_of(record: CallRecord) -> Headers:
    return call_headers(record.id, f"{record.function}@{record.revision}".encode())


def id_of_key(function: str, principal: Principal, idempotency_key: bytes | None) -> InvocationId | None:
    """None without a key."""
    if idempotency_key is None:
        return None
    if not 0 < len(idempotency_key) <= LONGEST_IDEMPOTENCY_KEY:
        raise InvalidInput(f"an Idempotency-Key has 1 to {LONGEST_IDEMPOTENCY_KEY} characters", field="Idempotency-Key")
    return invocation_id_for(function, principal.id, idempotency_key.decode("latin-1"))
