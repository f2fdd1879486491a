"""Submitted Invocations: the queue on disk, and the record of each one's end.

submit   the invocation is stored in ASYNC under its id (a repeat is the same message), then its CallRecord is created.
         A repeat is known by its digest: another call under the same id is refused
retry    the record names the attempts that failed, and where the next one waits
end      the record is replaced by compare-and-set, only while it has not ended: the first end wins; `keep_s` later it
         is removed
recent   reads the records' headers only, where a summary of each is: a result may be megabytes
wait     reads the record at each sign of a change
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable

import msgspec

from gpufn.bus import dead_letters, objects, streams
from gpufn.bus.connection import Bus, Message, NoResponders
from gpufn.bus.jetstream import Stored
from gpufn.bus.signs import Signs
from gpufn.bus.summaries import newest, summary
from gpufn.errors import BusUnavailable, Conflict, ErrorInfo, IdempotencyMismatch, InvocationExpired, InvocationNotFound
from gpufn.invocation import InvocationState, Outcome, OutcomeKind, state_after
from gpufn.protocol import subjects
from gpufn.protocol.codec import pack
from gpufn.protocol.messages import (
    CallRecord,
    Cancel,
    HeldBy,
    InvocationMessage,
    ResultReply,
    WhereIs,
    encode,
    unpack_invocation,
    unpack_record,
)
from gpufn.revision import Revision

log = logging.getLogger(__name__)

_ASK_AT_ONCE = 64  # calls whose whereabouts are asked for together

# A runner that has it answers within a millisecond; the others say nothing.
_WHERE_TIMEOUT_S = 0.1

_OVERDUE_S = 60.0

_held_by = msgspec.msgpack.Decoder(HeldBy)


async def submit(
    bus: Bus,
    revision: Revision,
    method: str,
    content_type: str,
    body: bytes,
    *,
    invocation: str,
    accept: str,
    deadline: float,
    now: float,
    parent: str = "",
    trace: str = "",
) -> CallRecord:
    """Queue an invocation for later; `now` and `deadline` (0: none) in unix seconds.

    An id that is known already is the same invocation: its record is returned and nothing is queued.
    Raises IdempotencyMismatch when it is known for another function, method or body; QueueFull, BusUnavailable.
    """
    subject = subjects.result(revision.function, invocation)
    digest = request_digest(revision.function, method, body)
    if (known := await _read(bus, subject)) is not None:
        return _checked(known[0], digest)
    message = InvocationMessage(
        id=invocation,
        function=revision.function,
        revision=revision.number,
        method=method,
        content_type=content_type,
        accept=accept,
        reply="",
        submitted_at=now,
        deadline=deadline,
        parent=parent,
        trace=trace,
        digest=digest,
    )
    stored = await _store(bus, message, body)
    record = CallRecord(
        id=invocation,
        function=revision.function,
        revision=revision.number,
        method=method,
        state=InvocationState.QUEUED,
        submitted_at=now,
        queue_seq=stored.seq,
        digest=digest,
        keep_s=revision.spec.retention_s,
    )
    bus.publish(subjects.doorbell(revision.function), b"")
    try:
        await bus.publish_stored(subject, pack(record), expected_last=0, headers=summary(record))
    except Conflict:  # it was quick and has ended, or somebody submitted the same id at the same time
        known = await _read(bus, subject)
        return record if known is None else _checked(known[0], digest)
    return record


def request_digest(function: str, method: str, body: bytes) -> str:
    """What makes two submissions under one id the same call."""
    digest = hashlib.sha256(f"{function}\0{method}\0".encode())
    digest.update(body)
    return digest.hexdigest()


async def _store(bus: Bus, message: InvocationMessage, body: bytes) -> Stored:
    queue, payload = subjects.async_queue(message.function, message.revision), pack(message, body)
    stored = await bus.publish_stored(queue, payload, msg_id=message.id)
    if not stored.duplicate:
        return stored
    first = await streams.next_message(bus, subjects.ASYNC, subjects.ASYNC_FILTER, stored.seq)
    if first is not None and first.seq == stored.seq:
        if unpack_invocation(first.payload)[0].digest != message.digest:
            raise IdempotencyMismatch
        return stored
    if await read(bus, message.id) is not None:
        return stored
    # It ended and its retention is over while the queue still remembers the id: this is a new call.
    return await bus.publish_stored(queue, payload, msg_id=f"{message.id}@{stored.seq}")


def _checked(known: CallRecord, digest: str) -> CallRecord:
    if known.digest and known.digest != digest:
        raise IdempotencyMismatch
    return known


async def read(bus: Bus, invocation: str) -> tuple[CallRecord, bytes] | None:
    """The record of a submitted invocation and, once it succeeded, its result."""
    return await _read(bus, subjects.any_result(invocation))


async def retry(bus: Bus, message: InvocationMessage, queue_seq: int) -> None:
    """Note that the invocation waits for its next attempt, which is `message`, stored in ASYNC at `queue_seq`.

    One that has ended meanwhile is taken out of the queue again.
    """
    subject = subjects.result(message.function, message.id)
    while (last := await streams.last_message(bus, subjects.RESULTS, subject)) is not None:
        known, _ = unpack_record(last.payload)
        if known.state.ended:
            await streams.delete_message(bus, subjects.ASYNC, queue_seq)
            return
        record = msgspec.structs.replace(
            known,
            attempt=message.attempt,
            attempts=message.attempts,
            not_before=message.not_before,
            queue_seq=queue_seq,
        )
        try:
            await bus.publish_stored(subject, pack(record), expected_last=last.seq, headers=summary(record))
        except Conflict:
            continue
        return


async def blob(bus: Bus, record: CallRecord) -> bytes:
    """A result that is too large to be beside its record. Raises ArtifactUnavailable."""
    async with contextlib.aclosing(blob_parts(bus, record)) as parts:
        return b"".join([part async for part in parts])


def blob_parts(bus: Bus, record: CallRecord) -> AsyncGenerator[bytes, None]:
    return objects.read(bus, subjects.RESULT_FILES, record.blob, owner=record.id)


async def end(bus: Bus, record: CallRecord, body: bytes = b"") -> bool:
    """Store how an invocation ended. False when it had ended already: then nothing is changed."""
    return await _end(bus, record, body) is not None


async def _end(bus: Bus, record: CallRecord, body: bytes = b"") -> CallRecord | None:
    """The record as stored; None when it had ended already."""
    subject = subjects.result(record.function, record.id)
    while True:
        last = await streams.last_message(bus, subjects.RESULTS, subject)
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
        try:
            await bus.publish_stored(
                subject,
                pack(record, body),
                expected_last=last.seq if last else 0,
                ttl_s=record.keep_s,
                headers=summary(record),
            )
        except Conflict:
            continue
        return record


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
    bus: Bus, function: str, limit: int, matches: Callable[[CallRecord], bool] = lambda _: True
) -> list[CallRecord]:
    """The submitted invocations of a function (``*``: of all) that match and changed last, by their submission, the
    newest first; their errors without traceback."""
    found = await newest(
        bus, subjects.RESULTS, subjects.result(function, "*"), CallRecord, limit=limit, matches=matches
    )
    return sorted(found, key=lambda record: record.submitted_at, reverse=True)


async def where(bus: Bus, invocation: str) -> HeldBy | None:
    """Which worker runs an invocation right now; None when no runner has it."""
    try:
        answer = await bus.request(subjects.WHEREABOUTS, encode(WhereIs(invocation)), timeout_s=_WHERE_TIMEOUT_S)
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


async def place(bus: Bus, record: CallRecord) -> int | None:
    """Its place among those that wait in its queue, from 1; None when it is in the queue no more."""
    queue = subjects.async_queue(record.function, record.revision, "*")
    consumer = subjects.async_consumer(record.function, record.revision)
    behind, stored, running = await asyncio.gather(
        streams.count_from(bus, subjects.ASYNC, queue, record.queue_seq),
        streams.messages_per_subject(bus, subjects.ASYNC, queue),
        streams.count_held(bus, subjects.ASYNC, consumer),
    )
    return None if behind is None else max(1, sum(stored.values()) - behind + 1 - running)


async def cancel(bus: Bus, record: CallRecord, now: float) -> bool:
    """End a submitted invocation as cancelled. False when it had ended already."""
    cancelled = await _end(bus, msgspec.structs.replace(record, state=InvocationState.CANCELLED, ended_at=now))
    if cancelled is None:
        return False
    await streams.delete_message(bus, subjects.ASYNC, cancelled.queue_seq)
    bus.publish(subjects.CANCELS, encode(Cancel(record.id)))
    return True


async def end_queued(
    bus: Bus, function: str, revision: int, *, kind: OutcomeKind, error: ErrorInfo | None, now: float
) -> int:
    """End every call that is still queued for a revision, submitted or waited for; returns how many.

    What a runner holds stays: it is still stored in the queue, but somebody has it and will end it.
    """
    outcome = Outcome(kind, error)
    ended = 0
    for stream, queue in (
        (subjects.SYNC, subjects.sync_queue(function, revision)),
        (subjects.ASYNC, subjects.async_queue(function, revision, "*")),
    ):
        seq = 1
        while batch := await _queued(bus, stream, queue, seq):
            seq = batch[-1][0] + 1
            ended += sum(await asyncio.gather(*(_end_unless_held(bus, *each, outcome, now) for each in batch)))
    return ended


async def end_overdue(bus: Bus, now: float) -> int:
    """End the calls at or near the heads of the sync queues whose deadline was over a minute ago; returns how many.

    Whoever waits ends his call himself, and a runner refuses it: these are what a gateway leaves that died, of
    functions that no worker can run.
    """
    error = InvocationExpired("it was still queued a minute after its deadline").info()
    outcome = Outcome(OutcomeKind.EXPIRED, error)
    ended = 0
    for queue in await streams.messages_per_subject(bus, subjects.SYNC):
        most, seq = 1, 1
        while batch := await _queued(bus, subjects.SYNC, queue, seq, most):
            late = [each for each in batch if each[1].deadline and now - each[1].deadline > _OVERDUE_S]
            ended += sum(await asyncio.gather(*(_end_unless_held(bus, *each, outcome, now) for each in late)))
            if len(late) < len(batch):
                break
            most, seq = _ASK_AT_ONCE, batch[-1][0] + 1
    return ended


async def _queued(
    bus: Bus, stream: str, queue: str, seq: int, most: int = _ASK_AT_ONCE
) -> list[tuple[int, InvocationMessage]]:
    """The next calls of a queue from `seq` on, without their arguments: those may be megabytes each."""
    found: list[tuple[int, InvocationMessage]] = []
    while len(found) < most and (message := await streams.next_message(bus, stream, queue, seq)) is not None:
        found.append((message.seq, unpack_invocation(message.payload)[0]))
        seq = message.seq + 1
    return found


async def _end_unless_held(bus: Bus, seq: int, invocation: InvocationMessage, outcome: Outcome, now: float) -> bool:
    try:
        if await where(bus, invocation.id) is not None:
            return False
        if not invocation.reply:
            return await end_stored(bus, seq, invocation, outcome, now)
        if is_ended := await streams.delete_message(bus, subjects.SYNC, seq):
            bus.publish(invocation.reply, pack(_ended_reply(invocation, outcome, now)))
        return is_ended
    except BusUnavailable as trouble:
        log.warning("invocation %s of %s is left in its queue: %s", invocation.id, invocation.function, trouble)
        return False


async def end_stored(bus: Bus, seq: int, invocation: InvocationMessage, outcome: Outcome, now: float) -> bool:
    """End a submitted call that is in the queue at `seq` and that no runner holds; False when it had ended already."""
    ended = await _end(bus, _ended_record(invocation, outcome, now))
    if ended is not None and ended.state.leaves_dead_letter:
        stored = await streams.next_message(bus, subjects.ASYNC, subjects.ASYNC_FILTER, seq)
        if stored is not None and stored.seq == seq:
            await dead_letters.bury(bus, ended, *unpack_invocation(stored.payload))
    await streams.delete_message(bus, subjects.ASYNC, seq)
    return ended is not None


def _ended_record(invocation: InvocationMessage, outcome: Outcome, now: float) -> CallRecord:
    return CallRecord(
        id=invocation.id,
        function=invocation.function,
        revision=invocation.revision,
        method=invocation.method,
        state=state_after(outcome.kind),
        submitted_at=invocation.submitted_at,
        ended_at=now,
        attempt=invocation.attempt,
        error=outcome.error,
        digest=invocation.digest,
        attempts=invocation.attempts,
    )


def _ended_reply(invocation: InvocationMessage, outcome: Outcome, now: float) -> ResultReply:
    return ResultReply(
        invocation=invocation.id,
        kind=outcome.kind,
        error=outcome.error,
        content_type="",
        revision=invocation.revision,
        attempt=invocation.attempt,
        queue_s=max(0.0, now - invocation.submitted_at),
        run_s=0.0,
    )


async def _read(bus: Bus, subject: str) -> tuple[CallRecord, bytes] | None:
    message = await streams.last_message(bus, subjects.RESULTS, subject)
    return None if message is None else unpack_record(message.payload)
