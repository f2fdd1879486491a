"""Calls that are in a queue and that no runner has: their place there, and their end when nobody will run them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import NamedTuple

from gpufn_core.domain.invocation import InvocationState, Outcome, OutcomeKind
from gpufn_core.errors import BusUnavailable, ErrorInfo, InvocationExpired
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import InvocationMessage, ResultReply, unpack_invocation
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.priority import Priority, QueueKind
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue import call_records, checkpoints, dead_letters, queued_calls

log = logging.getLogger(__name__)

_ASK_AT_ONCE = 64  # calls whose whereabouts are asked for together
_OVERDUE_S = 60.0
_MOST_READ_BYTES = 4 << 20  # of arguments that are read along, per look
_COUNTED = 256
SILENT_S = 2.0  # a runner answers within milliseconds; so long it is silent only while it stands still


class Address(NamedTuple):
    """Where a queue is on the bus: its stream, the consumer that runners pull from, and the subjects that it takes."""

    stream: str
    consumer: str
    subject: str


def address(function: str, revision: int, kind: QueueKind) -> Address:
    name, number, priority = function, revision, kind.priority
    if kind.is_sync:
        consumer = subjects.sync_consumer(name, number, priority)
        return Address(subjects.SYNC, consumer, subjects.sync_queue(name, number, priority))
    consumer = subjects.async_consumer(name, number, priority)
    return Address(subjects.ASYNC, consumer, subjects.async_queue(name, number, priority, "*"))


async def place(bus: Bus, record: CallRecord) -> int | None:
    """Its place among the submitted calls of its revision that wait, from 1, with those of higher classes before it;
    None when a runner has taken it, which may have handed it back.

    It is exact among the first few hundred. Further back it is estimated where calls of others lie in between, for the
    server reads what it counts.
    """
    classes = [priority for priority in Priority if not record.priority.is_above(priority)]
    *above, own = [address(record.function, record.revision, QueueKind(each, is_sync=False)) for each in classes]
    before, ours = await asyncio.gather(
        asyncio.gather(*(_consumed(bus, queue) for queue in above)), _consumed(bus, own)
    )
    if record.queue_seq <= ours.taken:
        return None
    return sum(queue.waiting for queue in before) + await _place(bus, own, record.queue_seq, ours)


async def _consumed(bus: Bus, queue: Address) -> streams.Consumed:
    found = await streams.consumed(bus, queue.stream, queue.consumer)
    if found is None:  # no runner has ever asked for them
        stored = await streams.messages_per_subject(bus, queue.stream, queue.subject)
        found = streams.Consumed(sum(stored.values()), 0)
    return found


async def _place(bus: Bus, queue: Address, seq: int, ours: streams.Consumed) -> int:
    last = int((await bus.js(f"STREAM.INFO.{queue.stream}"))["state"]["last_seq"])
    least, most = bounds(seq, ours, last)
    if least == most:
        return least
    head = await streams.batch_from(
        bus, queue.stream, queue.subject, ours.taken + 1, most=_COUNTED, max_bytes=_MOST_READ_BYTES
    )
    if head and head[-1].seq >= seq:
        return 1 + sum(message.seq < seq for message in head)
    among = round(ours.waiting * (seq - ours.taken) / max(1, last - ours.taken))
    return min(max(least, len(head) + 1, among), most)


def bounds(seq: int, ours: streams.Consumed, last: int) -> tuple[int, int]:
    """The first and the last place that a call at `seq` can have in a queue, by the stream's `last` sequence alone.

    >>> bounds(105, streams.Consumed(waiting=10, taken=100), 110)  # nobody else's are in between
    (5, 5)
    >>> bounds(105, streams.Consumed(waiting=7, taken=100), 110)
    (2, 5)
    """
    least = max(1, ours.waiting - (last - seq))
    return least, max(least, min(ours.waiting, seq - ours.taken))


async def stored(bus: Bus, function: str, revision: int) -> Counter[QueueKind]:
    """How many of a revision's calls are in its queues, waiting or running; those that came by the lane are not."""
    sync, asynchronous = await asyncio.gather(
        streams.messages_per_subject(bus, subjects.SYNC, subjects.sync_queue(function, revision, "*")),
        streams.messages_per_subject(bus, subjects.ASYNC, subjects.async_queue(function, revision, "*", "*")),
    )
    counts: Counter[QueueKind] = Counter()
    for is_sync, found in ((True, sync), (False, asynchronous)):
        for subject, count in found.items():
            counts[QueueKind(subjects.queue_class(subject), is_sync)] += count
    return counts


async def end_queued(
    bus: Bus, function: str, revision: int, *, kind: OutcomeKind, error: ErrorInfo | None, now: float
) -> int:
    """End every call that is still queued for a revision, submitted or waited for; returns how many.

    What a runner holds stays: it is still stored in the queue, but somebody has it and will end it.
    """
    outcome = Outcome(kind, error)
    ended = 0
    for stream, queue in (
        (subjects.SYNC, subjects.sync_queue(function, revision, "*")),
        (subjects.ASYNC, subjects.async_queue(function, revision, "*", "*")),
    ):
        seq = 1
        while batch := await queued(bus, stream, queue, seq):
            seq = batch[-1][0] + 1
            ended += sum(await asyncio.gather(*(end_unless_held(bus, *each, outcome, now) for each in batch)))
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
        while batch := await queued(bus, subjects.SYNC, queue, seq, most):
            late = [each for each in batch if each[1].deadline and now - each[1].deadline > _OVERDUE_S]
            ended += sum(await asyncio.gather(*(end_unless_held(bus, *each, outcome, now) for each in late)))
            if len(late) < len(batch):
                break
            most, seq = _ASK_AT_ONCE, batch[-1][0] + 1
    return ended


async def queued(
    bus: Bus, stream: str, queue: str, seq: int, most: int = _ASK_AT_ONCE
) -> list[tuple[int, InvocationMessage]]:
    """The next calls of a queue from `seq` on, without their arguments: those may be megabytes each, so fewer than
    `most` are not the last ones."""
    found: list[tuple[int, InvocationMessage]] = []
    left = _MOST_READ_BYTES
    while len(found) < most and left > 0 and (message := await streams.next_message(bus, stream, queue, seq)):
        found.append((message.seq, queued_calls.unpack(message.payload, message.seq)[0]))
        seq, left = message.seq + 1, left - len(message.payload)
    return found


async def is_held(bus: Bus, queue: Address, seq: int, invocation: str) -> bool:
    """Whether a runner has the call that is in its queue at `seq`. Of one that was handed over before, silence is
    believed only when it lasts: whoever has it may be busy, and a call that runs must not end as one that waits."""
    if await call_records.where(bus, invocation) is not None:
        return True
    if not await was_handed_over(bus, queue, seq):
        return False
    return await call_records.where(bus, invocation, within_s=SILENT_S) is not None


async def was_handed_over(bus: Bus, queue: Address, seq: int) -> bool:
    """Whether a runner has, or had, the call that is in its queue at `seq`: it may have begun."""
    found = await streams.consumed(bus, queue.stream, queue.consumer)
    return found is not None and seq <= found.taken


async def end_unless_held(bus: Bus, seq: int, invocation: InvocationMessage, outcome: Outcome, now: float) -> bool:
    """End a call that is in its queue at `seq`. False when a runner has it, when it had ended, or without the bus."""
    try:
        queue = address(invocation.function, invocation.revision, invocation.queue)
        if await is_held(bus, queue, seq, invocation.id):
            return False
        if not invocation.reply:
            is_ended = await call_records.end(bus, call_records.ended(invocation, outcome, now))
            await take_out_ended(bus, seq, invocation)
            return is_ended
        if (is_ended := await streams.delete_message(bus, subjects.SYNC, seq)) and subjects.is_reply(invocation.reply):
            bus.publish(invocation.reply, pack(_ended_reply(invocation, outcome, now)))
        return is_ended
    except BusUnavailable as trouble:
        log.warning("invocation %s of %s is left in its queue: %s", invocation.id, invocation.function, trouble)
        return False


async def take_out_ended(bus: Bus, seq: int, invocation: InvocationMessage) -> bool:
    """Take a submitted call out of its queue, where it is at `seq`, and do what else its end brings with it, if it has
    ended: whoever ended it may have died before that. False when it has not, or nobody knows."""
    found = await call_records.record_of(bus, invocation.id)
    if found is None or not found[0].state.ended:
        return False
    record, _ = found
    if record.state.leaves_dead_letter and (stored := await streams.message_at(bus, subjects.ASYNC, seq)) is not None:
        await dead_letters.bury(bus, record, *unpack_invocation(stored.payload))
    if record.attempts:
        await checkpoints.drop(bus, record.id)
    await streams.delete_message(bus, subjects.ASYNC, seq)
    if record.state is InvocationState.CANCELLED:
        await call_records.tell_cancelled(bus, record.id)
    return True


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
