"""Calls that nobody waits for: stored, then 202; later their status, their result, or their end."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn import media
from gpufn.bus import records
from gpufn.bus.connection import Bus
from gpufn.errors import Conflict, InvalidInput, InvocationNotFound, QueueFull
from gpufn.ids import InvocationId, invocation_id_for, is_invocation_id, new_invocation_id
from gpufn.invocation import InvocationState
from gpufn.protocol.messages import CallRecord, Progress
from gpufn_gateway.auth import READ, Principal
from gpufn_gateway.bodies import Receive, Send
from gpufn_gateway.calls import Calls

_LONGEST_KEY = 255


class IdTaken(Conflict):
    """Another function has an invocation with this id: choose another id."""

    retryable = False


class Submissions:
    def __init__(self, bus: Bus, calls: Calls) -> None:
        self._bus = bus
        self._calls = calls

    async def submit(
        self, name: str, headers: dict[bytes, bytes], receive: Receive, send: Send, *, invocation: str | None = None
    ) -> None:
        """Answer 202 once the call is stored. `invocation` is the client's own id: known already, it is that call."""
        if invocation is not None:
            invocation = invocation.lower()
            if not is_invocation_id(invocation):
                raise InvalidInput("an invocation's id is a ULID: 26 characters of 0-9 and a-z", field="id")
        call = await self._calls.prepare(name, headers, receive, waits=False)
        target = call.target
        if invocation is not None:
            known = await records.read(self._bus, invocation)
            if known is not None and known[0].function != target.name:
                raise IdTaken(f"Invocation {invocation} belongs to another function: choose another id.")
        try:
            record = await records.submit(
                self._bus,
                target.revision,
                target.method.name,
                call.content_type,
                call.body,
                invocation=invocation or _id(target.name, call.principal, headers.get(b"idempotency-key")),
                accept=call.accept,
                deadline=call.submit_deadline,
                now=call.now,
                trace=call.trace,
            )
        except QueueFull:
            raise self._calls.queue_full(target) from None
        body = msgspec.json.encode({"id": record.id, "state": record.state, "links": links(record.id)})
        answer = [
            (b"content-type", media.JSON.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"location", f"/v1/invocations/{record.id}".encode()),
            (b"x-gpufn-invocation", record.id.encode()),
            (b"x-gpufn-revision", f"{record.function}@{record.revision}".encode()),
        ]
        await send({"type": "http.response.start", "status": 202, "headers": answer})
        await send({"type": "http.response.body", "body": body})

    async def status(self, invocation: str, principal: Principal) -> dict[str, Any]:
        record, _ = await self._read(invocation, principal, may_read=True)
        return await self.view(record)

    async def result(self, invocation: str, principal: Principal, wait_s: float) -> tuple[CallRecord, bytes]:
        """The record, ended or, after `wait_s`, not; and its result."""
        record, body = await self._read(invocation, principal)
        if record.state.ended or not wait_s:
            return record, body
        return await records.wait(self._bus, invocation, wait_s)

    async def cancel(self, invocation: str, principal: Principal) -> tuple[CallRecord, bool]:
        """The record as it is then; False when it had ended already."""
        record, _ = await self._read(invocation, principal)
        cancelled = not record.state.ended and await records.cancel(self._bus, record, self._calls.clock.time())
        found = await records.read(self._bus, invocation)
        return (found[0] if found is not None else record), cancelled

    async def recent(self, function: str, limit: int) -> list[dict[str, Any]]:
        return [self._view(record) for record in await records.recent(self._bus, function, limit)]

    async def view(self, record: CallRecord) -> dict[str, Any]:
        """The status. Records are written at both ends only; in between the runners say who runs it."""
        progress = None
        if not record.state.ended and (held := await records.where(self._bus, record.id)) is not None:
            record = msgspec.structs.replace(
                record,
                state=InvocationState.RUNNING,
                started_at=held.started_at,
                attempt=held.attempt,
                queue_s=max(held.started_at - record.submitted_at, 0.0),
            )
            progress = held.progress
        return self._view(record, progress)

    def _view(self, record: CallRecord, progress: Progress | None = None) -> dict[str, Any]:
        status = self._calls.registry.status(record.function)
        waits = record.state is InvocationState.QUEUED and status is not None
        return {
            "id": record.id,
            "function": f"{record.function}.{record.method}" if record.method else record.function,
            "revision": record.revision,
            "state": record.state,
            "submitted_at": record.submitted_at,
            "started_at": record.started_at,
            "ended_at": record.ended_at,
            "attempt": record.attempt,
            "progress": progress,
            "queue_s": record.queue_s,
            "run_s": record.run_s,
            "error": record.error,
            "waiting": status.waiting if waits and status is not None else None,
            "links": links(record.id),
        }

    async def _read(self, invocation: str, principal: Principal, *, may_read: bool = False) -> tuple[CallRecord, bytes]:
        found = await records.read(self._bus, invocation) if is_invocation_id(invocation) else None
        if found is None:
            raise InvocationNotFound
        if not (may_read and principal.may(READ)):
            principal.need_invoke(found[0].function)
        return found


def links(invocation: str) -> dict[str, str]:
    here = f"/v1/invocations/{invocation}"
    return {"self": here, "result": f"{here}/result"}


def _id(function: str, principal: Principal, idempotency_key: bytes | None) -> InvocationId:
    if idempotency_key is None:
        return new_invocation_id()
    if not 0 < len(idempotency_key) <= _LONGEST_KEY:
        raise InvalidInput(f"an Idempotency-Key has 1 to {_LONGEST_KEY} characters", field="Idempotency-Key")
    return invocation_id_for(function, principal.id, idempotency_key.decode("latin-1"))
