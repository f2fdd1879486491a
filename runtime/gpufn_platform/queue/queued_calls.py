"""Submitted calls that have no record yet: their message in ASYNC is the only data about them.

The id of a call that was submitted without one ends with its sequence in ASYNC (`gpufn_core.ids`). So the call can be
found by its id without a record. A queued call costs the server one message, but not its own subject, which the server
would keep in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import NamedTuple

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.ids import id_at, is_stem, item_of, queue_position_in
from gpufn_core.protocol import subjects
from gpufn_core.protocol.limits import CHUNK_ITEMS
from gpufn_core.protocol.messages import InvocationMessage, unpack_invocation
from gpufn_core.protocol.records import CallRecord
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.ordered_reader import StoredMessage
from gpufn_platform.queue import map_log

_QUEUES = subjects.ASYNC_FILTER.removesuffix(">")
_AT_ONCE = 1000
_PART_BYTES = 4 << 20
_MAX_BYTES = 64 << 20
_MAX_SCANNED = 100_000
_RANGE_LENGTH = 10_000  # sequences at a time
MAX_CLOCK_SKEW_S = 60.0  # maximum skew between the server's clock (store times) and a gateway's (submission times)


def unpack(payload: bytes, seq: int) -> tuple[InvocationMessage, bytes]:
    """Decode the message stored at `seq`, with its complete id. Raises ProtocolMismatch."""
    message, body = unpack_invocation(payload)
    return identified(message, seq), body


def identified(message: InvocationMessage, seq: int) -> InvocationMessage:
    """Return the message with its complete id, which ends with `seq` if it was submitted without one."""
    return msgspec.structs.replace(message, id=id_at(message.id, seq)) if is_stem(message.id) else message


def record(message: InvocationMessage, seq: int) -> CallRecord:
    """Return the record of a call that waits in ASYNC at `seq`."""
    return CallRecord(
        id=message.id,
        function=message.function,
        revision=message.revision,
        method=message.method,
        state=InvocationState.QUEUED,
        submitted_at=message.submitted_at,
        queue_seq=seq,
        attempt=message.attempt,
        digest=message.digest,
        attempts=message.attempts,
        gpu_s=message.gpu_s,
        not_before=message.not_before,
        keep_s=message.keep_s,
        webhook=message.webhook,
        priority=message.priority,
        parent=message.parent,
        trace=message.trace,
        owner=message.owner,
    )


def may_lack_record(call: CallRecord) -> bool:
    """Return whether the call may lack a record: it was queued at the sequence in its id, or is an item of a map. A
    call
    with a given id has a record, and so has a call that is being retried."""
    is_item = call.attempt == 1 and item_of(call.id) is not None
    return is_item or (call.queue_seq > 0 and call.queue_seq == queue_position_in(call.id))


async def find(bus: Bus, invocation: str) -> CallRecord | None:
    """Find a queued call by its id; None if it is not at the sequence in its id."""
    call = await at(bus, queue_position_in(invocation) or await map_log.item_sequence(bus, invocation))
    return call if call is not None and call.id == invocation else None


async def at(bus: Bus, seq: int) -> CallRecord | None:
    """Return the call queued in ASYNC at `seq`, if it is still there."""
    stored = await streams.message_at(bus, subjects.ASYNC, seq)
    if stored is None or not stored.subject.startswith(_QUEUES):
        return None
    return record(unpack(stored.payload, seq)[0], seq)


class QueuedPage(NamedTuple):
    """Queued calls, newest first. Older ones are before `before_seq` of ASYNC; None: there are none."""

    calls: list[CallRecord]
    before_seq: int | None


async def search(
    bus: Bus,
    function: str,
    limit: int,
    matches: Callable[[CallRecord], bool] = lambda _: True,
    *,
    since: float = 0.0,
    before_seq: int | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> QueuedPage:
    """Return the newest matching calls in the queues of a function (``*``: of all) before `before_seq`, without items
    of maps.

    Calls submitted before `since` (unix seconds) may be skipped. Reading includes the arguments, so the search stops
    after 100,000 messages or 64 MiB, or when `is_over()`.
    """
    state = (await bus.js(f"STREAM.INFO.{subjects.ASYNC}"))["state"]
    all_queues, end = subjects.async_queues(function), state["last_seq"] + 1
    unseen = sum((await streams.messages_per_subject(bus, subjects.ASYNC, all_queues)).values())
    if not unseen:
        return QueuedPage([], None)
    end = end if before_seq is None else min(end, before_seq)
    first, remaining_bytes = max(1, state["first_seq"]), _MAX_BYTES
    oldest = max(first, end - _MAX_SCANNED)
    at_once = min(_AT_ONCE, max(1, _PART_BYTES * state["messages"] // max(1, state["bytes"])))  # about one part
    following = oldest if oldest > first else None
    matching: list[CallRecord] = []
    async with contextlib.aclosing(_outside_maps(bus, function, oldest, end, at_once)) as ranges:
        async for places in ranges:
            batch = await _between(bus, all_queues, places.start, places.stop)
            unseen -= len(batch)
            remaining_bytes -= sum(len(message.payload) for message in batch)
            calls = (record(unpack(message.payload, message.seq)[0], message.seq) for message in reversed(batch))
            matching += [call for call in calls if item_of(call.id) is None and matches(call)]
            if unseen <= 0 or (batch and batch[0].time < since - MAX_CLOCK_SKEW_S):
                following = None
                break
            if len(matching) >= limit or remaining_bytes <= 0 or is_over():
                following = places.start
                break
    if len(matching) > limit:
        following = matching[limit - 1].queue_seq
    return QueuedPage(matching[:limit], following)


async def _outside_maps(bus: Bus, function: str, oldest: int, end: int, at_once: int) -> AsyncGenerator[range, None]:
    """Yield the ranges of ASYNC between `start` and `end` outside the chunks of maps, last range first: there may be
    many thousands of map items between two calls."""
    while end > oldest:
        start = max(oldest, end - _RANGE_LENGTH)
        log = await _between(bus, subjects.map_log(function, "*"), start, end + CHUNK_ITEMS)
        for gap in reversed(outside(map(map_log.chunk_range, log), start, end)):
            for stop in range(gap.stop, gap.start, -at_once):
                yield range(max(gap.start, stop - at_once), stop)
        end = start


def outside(taken: Iterable[range], start: int, end: int) -> list[range]:
    """Return the parts of `start` to `end` (exclusive) outside the ranges `taken`, which are in order.

    >>> outside([range(3, 5), range(7, 12)], 4, 10)
    [range(5, 7)]
    """
    gaps = []
    for stretch in taken:
        gaps.append(range(start, min(stretch.start, end)))
        start = max(start, stretch.stop)
    gaps.append(range(start, end))
    return [gap for gap in gaps if gap]


async def _between(bus: Bus, subject: str, start: int, end: int) -> list[StoredMessage]:
    messages: list[StoredMessage] = []
    while start < end:
        most = min(end - start, _AT_ONCE)
        batch = await streams.batch_from(bus, subjects.ASYNC, subject, start, most=most, max_bytes=_PART_BYTES)
        messages += (message for message in batch if message.seq < end)
        start = batch[-1].seq + 1 if batch else end
    return messages
