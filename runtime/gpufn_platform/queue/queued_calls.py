"""Submitted calls that have no record yet: all that is known of them is their message in ASYNC.

A call that came without an id gets one whose end is its place in ASYNC (`gpufn_core.ids`). So it is found by its id without
a record, and one that is queued costs the server one message: no subject of its own, which it would keep in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.ids import id_at, is_stem, item_of, place_in
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
_MOST_BYTES = 64 << 20
_MOST_LOOKED_AT = 100_000
_CHUNKS_LOOKED_FOR = 10_000  # places at a time
CLOCKS_AGREE_S = 60.0  # the server's, which stamps what it stores, and a gateway's, which says when it was submitted


def unpack(payload: bytes, seq: int) -> tuple[InvocationMessage, bytes]:
    """What is stored at `seq`, with its whole id. Raises ProtocolMismatch."""
    message, body = unpack_invocation(payload)
    return identified(message, seq), body


def identified(message: InvocationMessage, seq: int) -> InvocationMessage:
    """With its whole id, which ends with `seq` if it came without one."""
    return msgspec.structs.replace(message, id=id_at(message.id, seq)) if is_stem(message.id) else message


def record(message: InvocationMessage, seq: int) -> CallRecord:
    """Of a call that waits in ASYNC at `seq`."""
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
    )


def may_have_no_record(call: CallRecord) -> bool:
    """Whether it waits, or was delivered, where its id says, or is an item of a map: one with an id of its own has a
    record, and so has one that is tried again."""
    is_item = call.attempt == 1 and item_of(call.id) is not None
    return is_item or (call.queue_seq > 0 and call.queue_seq == place_in(call.id))


async def find(bus: Bus, invocation: str) -> CallRecord | None:
    """A call in ASYNC by its id; None when it is not where its id says."""
    call = await at(bus, place_in(invocation) or await map_log.place_of(bus, invocation))
    return call if call is not None and call.id == invocation else None


async def at(bus: Bus, seq: int) -> CallRecord | None:
    """The call in ASYNC at `seq`, if one is there still."""
    stored = await streams.message_at(bus, subjects.ASYNC, seq)
    if stored is None or not stored.subject.startswith(_QUEUES):
        return None
    return record(unpack(stored.payload, seq)[0], seq)


async def recent(
    bus: Bus, function: str, limit: int, matches: Callable[[CallRecord], bool] = lambda _: True, *, since: float = 0.0
) -> list[CallRecord]:
    """The newest calls in the queues of a function (``*``: of all) that match, newest first; no items of maps. Those
    that were submitted before `since`, in unix seconds, need not be looked at.

    Their arguments are read along, so those before the last 100,000 are not looked at, nor those before 64 MiB.
    """
    state = (await bus.js(f"STREAM.INFO.{subjects.ASYNC}"))["state"]
    all_queues, end = subjects.async_queues(function), state["last_seq"] + 1
    unseen = sum((await streams.messages_per_subject(bus, subjects.ASYNC, all_queues)).values())
    if not unseen:
        return []
    oldest, left = max(state["first_seq"], end - _MOST_LOOKED_AT), _MOST_BYTES
    at_once = min(_AT_ONCE, max(1, _PART_BYTES * state["messages"] // max(1, state["bytes"])))  # about one part
    found: list[CallRecord] = []
    async with contextlib.aclosing(_outside_maps(bus, function, oldest, end, at_once)) as stretches:
        async for places in stretches:
            part = await _between(bus, all_queues, places.start, places.stop)
            unseen -= len(part)
            left -= sum(len(message.payload) for message in part)
            calls = (record(unpack(message.payload, message.seq)[0], message.seq) for message in reversed(part))
            found += [call for call in calls if item_of(call.id) is None and matches(call)]
            is_past = bool(part) and part[0].time < since - CLOCKS_AGREE_S
            if is_past or len(found) >= limit or left <= 0 or unseen <= 0:
                break
    return found[:limit]


async def _outside_maps(bus: Bus, function: str, oldest: int, end: int, at_once: int) -> AsyncGenerator[range, None]:
    """The places in ASYNC from `oldest` to before `end`, the last first, but those of maps' chunks: there may be many
    thousands between two calls."""
    while end > oldest:
        start = max(oldest, end - _CHUNKS_LOOKED_FOR)
        log = await _between(bus, subjects.map_log(function, "*"), start, end + CHUNK_ITEMS)
        for gap in reversed(outside(map(map_log.stretch, log), start, end)):
            for stop in range(gap.stop, gap.start, -at_once):
                yield range(max(gap.start, stop - at_once), stop)
        end = start


def outside(taken: Iterable[range], start: int, end: int) -> list[range]:
    """What of the places from `start` to before `end` none of the stretches `taken` has, which are in order.

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
    found: list[StoredMessage] = []
    while start < end:
        most = min(end - start, _AT_ONCE)
        part = await streams.batch_from(bus, subjects.ASYNC, subject, start, most=most, max_bytes=_PART_BYTES)
        found += (message for message in part if message.seq < end)
        start = part[-1].seq + 1 if part else end
    return found
