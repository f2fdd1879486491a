"""Submitted Invocations: the queue on disk, and the record of each one's end.

submit   the invocation is stored in ASYNC under its id (a repeat is the same message), then its CallRecord is created
end      the record is replaced by compare-and-set, only while it has not ended: the first end wins
recent   reads the records' headers only, where a summary of each is: a result may be megabytes
wait     subscribes to the record's subject, then reads it, so that no end is missed
"""

from __future__ import annotations

import asyncio
import base64
import logging

import msgspec

from gpufn.bus import streams
from gpufn.bus.connection import Bus, Message, NoResponders
from gpufn.errors import BusUnavailable, Conflict, ErrorInfo, InvocationExpired, InvocationNotFound
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

_SUMMARY = "Gpufn-Record"

_record = msgspec.msgpack.Decoder(CallRecord)
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
    Raises QueueFull, BusUnavailable.
    """
    subject = subjects.result(revision.function, invocation)
    if (known := await _read(bus, subject)) is not None:
        return known[0]
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
    )
    queue = subjects.async_queue(revision.function, revision.number)
    stored = await bus.publish_stored(queue, pack(message, body), msg_id=invocation)
    record = CallRecord(
        id=invocation,
        function=revision.function,
        revision=revision.number,
        method=method,
        state=InvocationState.QUEUED,
        submitted_at=now,
        queue_seq=stored.seq,
    )
    bus.publish(subjects.doorbell(revision.function), b"")
    try:
        await bus.publish_stored(subject, pack(record), expected_last=0, headers=_summary(record))
    except Conflict:  # it was quick and has ended, or somebody submitted the same id at the same time
        known = await _read(bus, subject)
        return known[0] if known is not None else record
    return record


async def read(bus: Bus, invocation: str) -> tuple[CallRecord, bytes] | None:
    """The record of a submitted invocation and, once it succeeded, its result."""
    return await _read(bus, subjects.any_result(invocation))


async def end(bus: Bus, record: CallRecord, body: bytes = b"") -> bool:
    """Store how an invocation ended. False when it had ended already: then nothing is changed."""
    subject = subjects.result(record.function, record.id)
    while True:
        last = await streams.last_message(bus, subjects.RESULTS, subject)
        if last is not None:
            known, _ = unpack_record(last.payload)
            if known.state.ended:
                return False
            record = msgspec.structs.replace(record, submitted_at=known.submitted_at, queue_seq=known.queue_seq)
        try:
            expected_last = last.seq if last else 0
            await bus.publish_stored(subject, pack(record, body), expected_last=expected_last, headers=_summary(record))
        except Conflict:
            continue
        return True


async def wait(bus: Bus, invocation: str, timeout_s: float) -> tuple[CallRecord, bytes]:
    """The record once it has ended, or as it is after `timeout_s`. Raises InvocationNotFound."""
    changed: asyncio.Event = asyncio.Event()

    def on_change(_: Message) -> None:
        changed.set()

    subscription = bus.subscribe(subjects.any_result(invocation), on_change)
    try:
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    changed.clear()
                    found = await read(bus, invocation)
                    if found is None or found[0].state.ended:
                        break
                    await changed.wait()
        except TimeoutError:
            found = await read(bus, invocation)
    finally:
        subscription.unsubscribe()
    if found is None:
        raise InvocationNotFound(f"there is no invocation {invocation}")
    return found


async def recent(bus: Bus, function: str, limit: int) -> list[CallRecord]:
    """The last submitted invocations of a function, newest first; their errors without traceback."""
    subject = subjects.result(function, "*")
    messages = await streams.history(bus, subjects.RESULTS, subject, last=limit, headers_only=True)
    # One without is of a release before 0.1.0.
    summaries = [message.headers[_SUMMARY] for message in messages if _SUMMARY in message.headers]
    records = [_record.decode(base64.b64decode(summary)) for summary in summaries]
    return sorted(records, key=lambda record: record.submitted_at, reverse=True)


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


async def cancel(bus: Bus, record: CallRecord, now: float) -> bool:
    """End a submitted invocation as cancelled. False when it had ended already."""
    cancelled = msgspec.structs.replace(record, state=InvocationState.CANCELLED, ended_at=now)
    if not await end(bus, cancelled):
        return False
    await streams.delete_message(bus, subjects.ASYNC, record.queue_seq)
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
            is_ended = await end(bus, _ended_record(invocation, outcome, now))
            await streams.delete_message(bus, subjects.ASYNC, seq)
            return is_ended
        if is_ended := await streams.delete_message(bus, subjects.SYNC, seq):
            bus.publish(invocation.reply, pack(_ended_reply(invocation, outcome, now)))
        return is_ended
    except BusUnavailable as trouble:
        log.warning("invocation %s of %s is left in its queue: %s", invocation.id, invocation.function, trouble)
        return False


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


def _summary(record: CallRecord) -> dict[str, str]:
    """The record once more, as a header: small enough to read a thousand of them."""
    if record.error is not None and record.error.traceback is not None:
        record = msgspec.structs.replace(record, error=msgspec.structs.replace(record.error, traceback=None))
    return {_SUMMARY: base64.b64encode(encode(record)).decode()}


async def _read(bus: Bus, subject: str) -> tuple[CallRecord, bytes] | None:
    message = await streams.last_message(bus, subjects.RESULTS, subject)
    return None if message is None else unpack_record(message.payload)
