"""Queued calls without a runner: their position in the queue, and the end of calls that will not run."""

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
from gpufn_platform.queue import queued_calls
from gpufn_platform.queue.records import call_records, checkpoints, dead_letters

log = logging.getLogger(__name__)

_BATCH_SIZE = 64  # calls whose runners are looked up concurrently
_OVERDUE_S = 60.0
_MAX_READ_BYTES = 4 << 20  # arguments, which are read with the calls, per lookup
_EXACT_POSITIONS = 256
RUNNER_SILENCE_S = 2.0  # a runner responds within milliseconds; it is silent for this long only while it is suspended


class Address(NamedTuple):
    """A queue on the bus: its stream, the consumer that runners pull from, and its subjects."""

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


async def position(bus: Bus, record: CallRecord) -> int | None:
    """Return the call's position among the waiting submitted calls of its revision, from 1, after calls of higher
    priority. None if a runner has taken it, even if it was handed back.

    Exact for the first few hundred. Further back it is estimated if other calls lie in between, because an exact count
    would make the server read them.
    """
    classes = [priority for priority in Priority if not record.priority.is_above(priority)]
    *above, own = [address(record.function, record.revision, QueueKind(each, is_sync=False)) for each in classes]
    before, own_progress = await asyncio.gather(
        asyncio.gather(*(_consumed(bus, queue) for queue in above)), _consumed(bus, own)
    )
    if record.queue_seq <= own_progress.taken:
        return None
    return sum(queue.waiting for queue in before) + await _place(bus, own, record.queue_seq, own_progress)


async def _consumed(bus: Bus, queue: Address) -> streams.ConsumerProgress:
    progress = await streams.consumed(bus, queue.stream, queue.consumer)
    if progress is None:  # no runner has pulled from this queue yet
        stored = await streams.messages_per_subject(bus, queue.stream, queue.subject)
        progress = streams.ConsumerProgress(sum(stored.values()), 0)
    return progress


async def _place(bus: Bus, queue: Address, seq: int, own_progress: streams.ConsumerProgress) -> int:
    last = int((await bus.js(f"STREAM.INFO.{queue.stream}"))["state"]["last_seq"])
    least, most = bounds(seq, own_progress, last)
    if least == most:
        return least
    head = await streams.batch_from(
        bus, queue.stream, queue.subject, own_progress.taken + 1, most=_EXACT_POSITIONS, max_bytes=_MAX_READ_BYTES
    )
    if head and head[-1].seq >= seq:
        return 1 + sum(message.seq < seq for message in head)
    estimate = round(own_progress.waiting * (seq - own_progress.taken) / max(1, last - own_progress.taken))
    return min(max(least, len(head) + 1, estimate), most)


def bounds(seq: int, own_progress: streams.ConsumerProgress, last: int) -> tuple[int, int]:
    """Return the first and last possible position of a call at `seq` in a queue, given the stream's `last` sequence.

    >>> bounds(105, streams.ConsumerProgress(waiting=10, taken=100), 110)  # no other calls in between
    (5, 5)
    >>> bounds(105, streams.ConsumerProgress(waiting=7, taken=100), 110)
    (2, 5)
    """
    least = max(1, own_progress.waiting - (last - seq))
    return least, max(least, min(own_progress.waiting, seq - own_progress.taken))


async def stored(bus: Bus, function: str, revision: int) -> Counter[QueueKind]:
    """Count the calls in a revision's queues, waiting or running; calls on the fast path are not included."""
    sync, asynchronous = await asyncio.gather(
        streams.messages_per_subject(bus, subjects.SYNC, subjects.sync_queue(function, revision, "*")),
        streams.messages_per_subject(bus, subjects.ASYNC, subjects.async_queue(function, revision, "*", "*")),
    )
    counts: Counter[QueueKind] = Counter()
    for is_sync, counts_by_subject in ((True, sync), (False, asynchronous)):
        for subject, count in counts_by_subject.items():
            counts[QueueKind(subjects.queue_class(subject), is_sync)] += count
    return counts


async def end_queued(
    bus: Bus, function: str, revision: int, *, kind: OutcomeKind, error: ErrorInfo | None, now: float
) -> int:
    """End every call that is still queued for a revision, submitted or waited for; returns how many.

    Calls that a runner holds are still stored in the queue, but stay: the runner will end them.
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
    """End calls at or near the heads of the sync queues whose deadline passed over a minute ago; returns how many.

    A waiting caller ends its calls itself, and a runner refuses expired ones. A gateway that died left these calls, for
    functions that have no worker.
    """
    error = InvocationExpired("it was still queued a minute after its deadline").info()
    outcome = Outcome(OutcomeKind.EXPIRED, error)
    ended = 0
    for queue in await streams.messages_per_subject(bus, subjects.SYNC):
        most, seq = 1, 1
        while batch := await queued(bus, subjects.SYNC, queue, seq, most):
            late = [item for item in batch if item[1].deadline and now - item[1].deadline > _OVERDUE_S]
            ended += sum(await asyncio.gather(*(end_unless_held(bus, *each, outcome, now) for each in late)))
            if len(late) < len(batch):
                break
            most, seq = _BATCH_SIZE, batch[-1][0] + 1
    return ended


async def queued(
    bus: Bus, stream: str, queue: str, seq: int, most: int = _BATCH_SIZE
) -> list[tuple[int, InvocationMessage]]:
    """Return the next calls of a queue from `seq` on, without their arguments. Arguments may be megabytes each, so
    fewer than `most` calls do not imply the end of the queue."""
    calls: list[tuple[int, InvocationMessage]] = []
    remaining = _MAX_READ_BYTES
    while len(calls) < most and remaining > 0 and (message := await streams.next_message(bus, stream, queue, seq)):
        calls.append((message.seq, queued_calls.unpack(message.payload, message.seq)[0]))
        seq, remaining = message.seq + 1, remaining - len(message.payload)
    return calls


async def is_held(bus: Bus, queue: Address, seq: int, invocation: str) -> bool:
    """Return whether a runner has the call queued at `seq`. If it was delivered before, only a long silence means no:
    its runner may be busy, and a running call must not end as a waiting one."""
    if await call_records.locate(bus, invocation) is not None:
        return True
    if not await was_handed_over(bus, queue, seq):
        return False
    return await call_records.locate(bus, invocation, within_s=RUNNER_SILENCE_S) is not None


async def was_handed_over(bus: Bus, queue: Address, seq: int) -> bool:
    """Return whether a runner has, or had, the call queued at `seq`: it may have started."""
    progress = await streams.consumed(bus, queue.stream, queue.consumer)
    return progress is not None and seq <= progress.taken


async def end_unless_held(bus: Bus, seq: int, invocation: InvocationMessage, outcome: Outcome, now: float) -> bool:
    """End the call queued at `seq`. Returns False if a runner has it, it had ended, or the bus is unavailable."""
    try:
        queue = address(invocation.function, invocation.revision, invocation.queue)
        if await is_held(bus, queue, seq, invocation.id):
            return False
        if not invocation.reply:
            is_ended = await call_records.end(bus, call_records.ended(invocation, outcome, now))
            await remove_ended_call(bus, seq, invocation)
            return is_ended
        if (is_ended := await streams.delete_message(bus, subjects.SYNC, seq)) and subjects.is_reply(invocation.reply):
            bus.publish(invocation.reply, pack(_ended_reply(invocation, outcome, now)))
        return is_ended
    except BusUnavailable as error:
        log.warning("invocation %s of %s stays in its queue: %s", invocation.id, invocation.function, error)
        return False


async def remove_ended_call(bus: Bus, seq: int, invocation: InvocationMessage) -> bool:
    """Remove a submitted call at `seq` from its queue if it has ended, and complete its end: the process that ended it
    may have died before that. Returns False if it has not ended, or that is unknown."""
    result = await call_records.record_of(bus, invocation.id)
    if result is None or not result[0].state.ended:
        return False
    record, _ = result
    if record.state.leaves_dead_letter and (stored := await streams.message_at(bus, subjects.ASYNC, seq)) is not None:
        await dead_letters.store(bus, record, *unpack_invocation(stored.payload))
    if record.attempts:
        await checkpoints.drop(bus, record.id)
    await streams.delete_message(bus, subjects.ASYNC, seq)
    if record.state is InvocationState.CANCELLED:
        await call_records.publish_cancel(bus, record.id)
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
