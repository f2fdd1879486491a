"""Submitted Invocations: the queue on disk, and the record of each one's end.

submit   the invocation is stored in ASYNC. One that comes with an id is stored under it (a repeat is the same message),
         then its CallRecord is created; a repeat is known by its digest: another call under the same id is refused. The
         others have no record while they wait for the first time (`queued_calls`)
retry    the record names the attempts that failed, and where the next one waits
end      the record is created, or replaced by compare-and-set while it has not ended: the first end wins; `keep_s`
         later it is removed. Before it, the job of its webhook is stored
recent   reads headers only, where a summary of each record is: a result may be megabytes
wait     reads the record at each sign of a change
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable

import msgspec

from gpufn_core.domain.invocation import InvocationState, Outcome, state_after
from gpufn_core.errors import BusUnavailable, Conflict, IdempotencyMismatch, InvocationNotFound
from gpufn_core.ids import new_stem
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import Cancel, HeldBy, InvocationMessage, WhereIs, unpack_invocation
from gpufn_core.protocol.records import BodyReference, CallRecord, Webhook, unpack_record
from gpufn_platform.bus.connection import Bus, Message, NoResponders
from gpufn_platform.bus.jetstream import Stored
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.change_wait import Signs
from gpufn_platform.bus.storage.header_summary import MOST_LOOKED_AT, newest, summary, summary_of
from gpufn_platform.queue import checkpoints, dead_letters, queued_calls, wakeups
from gpufn_platform.queue.call_request import CallRequest

log = logging.getLogger(__name__)

# A runner that has it answers within a millisecond; the others say nothing.
_WHERE_TIMEOUT_S = 0.1

_summary = summary_of(CallRecord)
_held_by = msgspec.msgpack.Decoder(HeldBy)


def ended(message: InvocationMessage, outcome: Outcome, now: float) -> CallRecord:
    """The record of a call's end at `now`, with all that the message has for it; when and for how long it ran is for
    whoever ran it to add."""
    return msgspec.structs.replace(
        queued_calls.record(message, 0),
        state=state_after(outcome.kind),
        ended_at=now,
        error=outcome.error,
        not_before=0.0,
    )


async def submit(
    bus: Bus,
    request: CallRequest,
    *,
    now: float,
    invocation: str | None = None,
    webhook: Webhook | None = None,
    ringer: wakeups.Ringer | None = None,
) -> CallRecord:
    """Queue an invocation for later; `now` in unix seconds. Its end is told to `webhook`, else to the function's.
    Who submits many has a `ringer` for all of them.

    An id that is known already is the same invocation: its record is returned and nothing is queued. Without one
    the call is new.
    Raises IdempotencyMismatch when it is known for another function, method or body; QueueFull, BusUnavailable.
    """
    revision, body = request.revision, request.body
    digest = request_digest(revision.function, request.method, body, request.reference)
    if invocation is not None and (known := await read(bus, invocation)) is not None:
        return _checked(known[0], digest)
    if webhook is None and revision.spec.webhook:
        webhook = Webhook(revision.spec.webhook)
    message = InvocationMessage(
        id=invocation or new_stem(),
        function=revision.function,
        revision=revision.number,
        method=request.method,
        content_type=request.content_type,
        accept=request.accept,
        reply="",
        submitted_at=now,
        deadline=request.deadline,
        parent=request.parent,
        trace=request.trace,
        digest=digest,
        webhook=webhook,
        keep_s=revision.spec.retention_s,
        priority=request.queued_as,
        owner=request.owner,
        reference=request.reference,
    )
    if invocation is None:
        stored = await _store_new(bus, message, body)
    else:
        stored, message = await _store(bus, message, body)
    (ringer or wakeups.Ringer(bus)).ring(revision.function, message.queue)
    record = queued_calls.record(queued_calls.identified(message, stored.seq), stored.seq)
    return record if invocation is None else await _create(bus, record)


async def _create(bus: Bus, record: CallRecord) -> CallRecord:
    try:
        await _store_record(bus, record, expected_last=0)
    except Conflict:  # it was quick and has ended, or somebody submitted the same id at the same time
        known = await record_of(bus, record.id)
        return record if known is None else _checked(known[0], record.digest)
    return record


def request_digest(function: str, method: str, body: bytes, reference: BodyReference | None = None) -> str:
    """What makes two submissions under one id the same call."""
    digest = hashlib.sha256(f"{function}\0{method}\0".encode())
    digest.update(body if reference is None else reference.digest.encode())
    return digest.hexdigest()


async def _store_new(bus: Bus, message: InvocationMessage, body: bytes) -> Stored:
    """Without an id that the server would have to keep in memory; so what may be stored is not sent again."""
    queue = subjects.async_queue(message.function, message.revision, message.priority, message.owner)
    try:
        return await bus.publish_stored(queue, pack(message, body))
    except BusUnavailable as error:
        what = "the call may have been accepted all the same; with an Idempotency-Key it could be sent again safely"
        raise type(error)(f"{error.message.rstrip('.')}: {what}") from error


async def _store(bus: Bus, message: InvocationMessage, body: bytes) -> tuple[Stored, InvocationMessage]:
    """Where it is stored, and what is stored there: the first of those that were submitted under one id."""
    queue = subjects.async_queue(message.function, message.revision, message.priority, message.owner)
    payload, msg_id = pack(message, body), message.id
    while True:
        stored = await bus.publish_stored(queue, payload, msg_id=msg_id)
        if not stored.duplicate:
            return stored, message
        found = await streams.message_at(bus, subjects.ASYNC, stored.seq)
        if found is not None:
            first, _ = unpack_invocation(found.payload)
            if first.digest != message.digest:
                raise IdempotencyMismatch
            return stored, first
        if await read(bus, message.id) is not None:
            return stored, message
        # It ended and its retention is over while the queue still remembers the id: this is a new call, or the next.
        msg_id = f"{message.id}@{stored.seq}"


def _checked(known: CallRecord, digest: str) -> CallRecord:
    if known.digest and known.digest != digest:
        raise IdempotencyMismatch
    return known


async def record_of(bus: Bus, invocation: str) -> tuple[CallRecord, bytes] | None:
    """As `read`, but None as well of a call that has no record while it waits."""
    message = await streams.last_message(bus, subjects.RESULTS, subjects.any_result(invocation))
    return None if message is None else unpack_record(message.payload)


async def read(bus: Bus, invocation: str) -> tuple[CallRecord, bytes] | None:
    """The record of a submitted invocation and, once it succeeded, its result."""
    if (told := await record_of(bus, invocation)) is not None:
        return told
    if (queued := await queued_calls.find(bus, invocation)) is not None:
        return queued, b""
    return await record_of(bus, invocation)  # it may have ended between the two looks


async def retry(bus: Bus, message: InvocationMessage, body: bytes, queue_seq: int) -> None:
    """Note that the invocation waits for its next attempt, which is `message`, stored in ASYNC at `queue_seq`.

    One that has ended meanwhile is taken out of the queue again, and its dead letter is kept: who ended it may have
    died before that.
    """
    record = queued_calls.record(message, queue_seq)
    while True:
        last = await streams.last_message(bus, subjects.RESULTS, subjects.result(message.function, message.id))
        if last is not None and (known := unpack_record(last.payload)[0]).state.ended:
            await dead_letters.bury(bus, known, message, body)
            await streams.delete_message(bus, subjects.ASYNC, queue_seq)
            return
        try:
            await _store_record(bus, record, expected_last=last.seq if last else 0)
        except Conflict:
            continue
        return


async def blob(bus: Bus, record: CallRecord) -> bytes:
    """A result that is too large to be beside its record. Raises ArtifactUnavailable."""
    async with contextlib.aclosing(blob_parts(bus, record)) as parts:
        return b"".join([part async for part in parts])


def blob_parts(bus: Bus, record: CallRecord) -> AsyncGenerator[bytes, None]:
    return object_store.read(bus, subjects.RESULT_FILES, record.blob, owner=record.id)


async def end(bus: Bus, record: CallRecord, body: bytes = b"") -> bool:
    """Store how an invocation ended. False when it had ended already: then nothing is changed."""
    return await _end(bus, record, body) is not None


async def _end(bus: Bus, record: CallRecord, body: bytes = b"") -> CallRecord | None:
    """The record as stored; None when it had ended already."""
    # Then a look costs more than to be refused; but a webhook's job must not be stored for an end that is.
    is_first = queued_calls.may_have_no_record(record) and record.webhook is None
    while True:
        last = None
        if not is_first:
            last = await streams.last_message(bus, subjects.RESULTS, subjects.result(record.function, record.id))
        is_first = False
        if last is not None:
            known, _ = unpack_record(last.payload)
            if known.state.ended:
                return None
            record = msgspec.structs.replace(
                record,
                submitted_at=known.submitted_at,
                queue_seq=known.queue_seq,
                digest=known.digest,
                keep_s=known.keep_s,
                attempts=record.attempts or known.attempts,
            )
        if record.webhook is not None:  # before the end itself, so that nobody who dies in between leaves it untold
            job, which_end = subjects.webhook(record.function), f"{record.id}.{record.ended_at}"
            await bus.publish_stored(job, record.id.encode(), msg_id=which_end)
        try:
            await _store_record(bus, record, body, expected_last=last.seq if last else 0, ttl_s=record.keep_s)
        except Conflict:
            continue
        return record


async def _store_record(
    bus: Bus, record: CallRecord, body: bytes = b"", *, expected_last: int, ttl_s: float | None = None
) -> None:
    subject, headers = subjects.result(record.function, record.id), summary(record)
    await bus.publish_stored(subject, pack(record, body), expected_last=expected_last, ttl_s=ttl_s, headers=headers)


async def wait(bus: Bus, invocation: str, timeout_s: float) -> tuple[CallRecord, bytes]:
    """The record once it has ended, or as it is after `timeout_s`. Raises InvocationNotFound."""
    async with Signs(bus, subjects.any_result(invocation)) as signs:
        try:
            async with asyncio.timeout(timeout_s):
                while (found := await read(bus, invocation)) is not None and not found[0].state.ended:
                    await signs.next()
        except TimeoutError:
            found = await read(bus, invocation)
    if found is None:
        raise InvocationNotFound(f"there is no invocation {invocation}")
    return found


async def recent(
    bus: Bus,
    function: str,
    limit: int,
    matches: Callable[[CallRecord], bool] = lambda _: True,
    *,
    since: float = 0.0,
    ended_only: bool = False,
) -> list[CallRecord]:
    """The submitted invocations of a function (``*``: of all) that match and changed last, by their submission, the
    newest first; their errors without traceback. Of those that were submitted at `since`, in unix seconds, or later;
    `ended_only`: `matches` has no use for others, which are not looked for then."""
    looked_at: set[str] = set()

    def is_asked_for(record: CallRecord) -> bool:
        return record.submitted_at >= since and matches(record)

    def is_told(record: CallRecord) -> bool:
        looked_at.add(record.id)
        return is_asked_for(record)

    queued: list[CallRecord] = []
    if not ended_only:
        queued = await queued_calls.recent(bus, function, limit, is_asked_for, since=since)
    results = subjects.result(function, "*")
    stored_since = since - queued_calls.CLOCKS_AGREE_S
    found = await newest(bus, subjects.RESULTS, results, _summary, limit=limit, matches=is_told, since=stored_since)
    found += (call for call in queued if call.id not in looked_at)  # what has just ended is still in its queue
    changed_last = sorted(found, key=_changed_at, reverse=True)[:limit]
    return sorted(changed_last, key=lambda record: record.submitted_at, reverse=True)


def _changed_at(record: CallRecord) -> float:
    return record.ended_at or (record.attempts[-1].ended_at if record.attempts else record.submitted_at)


async def waiting_of_map(bus: Bus, function: str, map_id: str, *, limit: int = MOST_LOOKED_AT) -> list[CallRecord]:
    """The items of a map that have failed and are to be tried again, as far as its last 100,000 records tell."""
    found = subjects.map_results(function, map_id)
    return await newest(bus, subjects.RESULTS, found, _summary, limit=limit, matches=lambda each: not each.state.ended)


async def where(bus: Bus, invocation: str, *, within_s: float = _WHERE_TIMEOUT_S) -> HeldBy | None:
    """Which worker runs an invocation right now; None when no runner says so within that time: it may be busy."""
    try:
        answer = await bus.request(subjects.WHEREABOUTS, encode(WhereIs(invocation)), timeout_s=within_s)
    except NoResponders:
        return None
    except BusUnavailable:
        if not bus.connected:
            raise
        return None
    return _held_by.decode(answer.payload)


async def held(bus: Bus) -> dict[str, HeldBy]:
    """Every submitted invocation that runs right now, by id."""
    found: dict[str, HeldBy] = {}

    def on_answer(message: Message) -> None:
        if not message.status:
            each = _held_by.decode(message.payload)
            found[each.invocation] = each

    inbox = bus.new_inbox()
    subscription = bus.subscribe(inbox, on_answer)
    try:
        bus.publish(subjects.WHEREABOUTS, encode(WhereIs("")), reply=inbox)
        await asyncio.sleep(_WHERE_TIMEOUT_S)
    finally:
        subscription.unsubscribe()
    return found


async def cancel(bus: Bus, record: CallRecord, now: float) -> bool:
    """End a submitted invocation as cancelled. False when it had ended already. One that was cancelled is taken out of
    its queue, and its runner told, all the same: who cancelled it may have lost the bus before that.

    Raises BusUnavailable when the runner may not have been told.
    """
    cancelled = await _end(bus, msgspec.structs.replace(record, state=InvocationState.CANCELLED, ended_at=now))
    if cancelled is None and record.state is not InvocationState.CANCELLED:
        return False
    known = cancelled or record
    if known.attempts:
        await checkpoints.drop(bus, known.id)
    if known.queue_seq:
        await streams.delete_message(bus, subjects.ASYNC, known.queue_seq)
    await tell_cancelled(bus, known.id)
    return cancelled is not None


async def tell_cancelled(bus: Bus, invocation: str) -> None:
    """Have runners end it; of a map's id, all of its items. Raises BusUnavailable when they may not have been told."""
    bus.publish(subjects.CANCELS, encode(Cancel(invocation)))
    await bus.flush()
