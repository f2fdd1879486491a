"""Maps: calls of one function over many items, stored in chunks. Each map has a log in ASYNC, its queue's stream.

append   a chunk's entry and its items are one atomic batch, and the entry is stored by compare-and-set on the log. So a
         chunk is accepted completely or not at all, and once, however often it arrives. Its items need no other writes
last     the newest entry says how many items were accepted, and whether more may follow
places   a batch is stored without gaps, so its entry's sequence determines the sequence of each of its items
         (`gpufn_platform.queue.queued_calls` looks there)

The oldest entries of an endless map are pruned: `item_sequences` knows only the items of the last `_KEPT_CHUNKS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import Conflict
from gpufn_core.ids import item_id, item_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.records import BodyReference, MapEntry, Webhook
from gpufn_core.spec.priority import Priority, QueueKind
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.ordered_reader import StoredMessage
from gpufn_platform.queue import wakeups
from gpufn_platform.queue.call_request import CallRequest

_KEPT_CHUNKS: Final = 10_000
_AT_ONCE: Final = 1000  # entries read together
_AT_ONCE_BYTES: Final = 4 << 20
_PRUNE_INTERVAL: Final = 1_000

_entry = msgspec.msgpack.Decoder(MapEntry)


class Logged(NamedTuple):
    """An entry, and its sequence in ASYNC."""

    seq: int
    entry: MapEntry


class Target(NamedTuple):
    """The revision and method that a chunk's items call."""

    revision: Revision
    method: str


class Items(NamedTuple):
    """One argument body per item, and options for all of them, as for a submitted call (`call_records.submit`)."""

    bodies: Sequence[bytes | memoryview]
    content_type: str
    accept: str
    deadline: float = 0.0
    trace: str = ""
    webhook: Webhook | None = None
    priority: Priority | None = None
    owner: str = subjects.PLATFORM
    references: Mapping[int, BodyReference] = {}  # index in `bodies` → reference of a body too large for a message

    @property
    def digest(self) -> str:
        """Identifies a chunk that is sent again."""
        digest = hashlib.sha256()
        for body in self.bodies:
            digest.update(b"%d:" % len(body))
            digest.update(body)
        return digest.hexdigest()


async def last(bus: Bus, map_id: str) -> Logged | None:
    """Return the map's newest entry, or None if nothing was accepted."""
    message = await streams.last_message(bus, subjects.ASYNC, subjects.map_log("*", map_id))
    return None if message is None else _decode_entry(message)


async def append(
    bus: Bus, before: Logged | None, map_id: str, target: Target, items: Items, *, now: float, closes: bool
) -> Logged:
    """Append a chunk of items after the entry `before`. Raises Conflict if that is no longer the last entry; QueueFull,
    BusUnavailable."""
    revision, method = target
    entry = _entry_after(before, map_id, target, items, now=now, closes=closes)
    priority = revision.spec.priority if items.priority is None else items.priority
    queue = subjects.async_queue(revision.function, revision.number, priority, items.owner)
    batch: list[tuple[str, bytes]] = []
    for position, body in enumerate(items.bodies):
        reference = items.references.get(position)
        request = CallRequest(
            revision, method, items.content_type, b"", items.accept, items.deadline,
            trace=items.trace, priority=priority, owner=items.owner, reference=reference,
        )  # fmt: skip
        message = request.submission(item_id(map_id, entry.first + position), now, items.webhook)
        batch.append((queue, pack(message, body if reference is None else b"")))
    log = subjects.map_log(revision.function, map_id)
    batch.append((log, encode(entry)))
    stored = await bus.publish_batch(batch, expected_last=0 if before is None else before.seq)
    if items.bodies:
        wakeups.send_wakeup(bus, revision.function, QueueKind(priority, is_sync=False), revision.number)
    if entry.chunk > _KEPT_CHUNKS and not entry.chunk % _PRUNE_INTERVAL:
        await streams.purge(bus, subjects.ASYNC, log, keep=_KEPT_CHUNKS)
    return Logged(stored.seq, entry)


def _entry_after(
    before: Logged | None, map_id: str, target: Target, items: Items, *, now: float, closes: bool
) -> MapEntry:
    revision, method = target
    first = 0 if before is None else before.entry.accepted
    return MapEntry(
        id=map_id,
        function=revision.function,
        revision=revision.number,
        method=method,
        submitted_at=now if before is None else before.entry.submitted_at,
        first=first,
        accepted=first + len(items.bodies),
        chunk=1 if before is None else before.entry.chunk + 1,
        digest=items.digest,
        is_tried_once=revision.spec.retries is None and (before is None or before.entry.is_tried_once),
        is_closed=closes,
    )


async def cancel(bus: Bus, before: Logged) -> Logged:
    """Accept no further items; the caller must end the accepted ones. Raises Conflict like `append`."""
    entry = msgspec.structs.replace(before.entry, is_cancelled=True)
    log = subjects.map_log(entry.function, entry.id)
    return Logged((await bus.publish_stored(log, encode(entry), expected_last=before.seq)).seq, entry)


async def end(bus: Bus, before: Logged) -> None:
    """Record that all items have ended, for when their records have expired; unless there is a newer entry."""
    entry = msgspec.structs.replace(before.entry, is_ended=True)
    with contextlib.suppress(Conflict):
        log = subjects.map_log(entry.function, entry.id)
        await bus.publish_stored(log, encode(entry), expected_last=before.seq)


async def entries(bus: Bus, entry: MapEntry) -> list[Logged]:
    """Return the log of a map, oldest entry first."""
    log, entries = subjects.map_log(entry.function, entry.id), list[Logged]()
    while True:
        seq = entries[-1].seq + 1 if entries else 1
        part = await streams.batch_from(bus, subjects.ASYNC, log, seq, most=_AT_ONCE, max_bytes=_AT_ONCE_BYTES)
        entries += map(_decode_entry, part)
        if not part:
            return entries


def item_sequences(log: Sequence[Logged]) -> Iterator[tuple[int, int]]:
    """Yield each item's index and sequence in ASYNC, as far as known, last item first."""
    for seq, entry in reversed(log):
        if not (entry.is_cancelled or entry.is_ended):
            for index in range(entry.accepted - 1, entry.first - 1, -1):
                yield index, seq - entry.accepted + index


def chunk_range(message: StoredMessage) -> range:
    """Return the sequences of a chunk in ASYNC from the map log's `message`: its items, then its entry."""
    seq, entry = _decode_entry(message)
    items = 0 if entry.is_cancelled or entry.is_ended else entry.accepted - entry.first
    return range(seq - items, seq + 1)


async def item_sequence(bus: Bus, invocation: str) -> int:
    """Return the sequence of an item in ASYNC, by its id; 0 if it is pruned or was not accepted as an item."""
    if (item := item_of(invocation)) is None or (newest := await last(bus, item[0])) is None:
        return 0
    for seq, entry in await entries(bus, newest.entry):
        if entry.first <= item[1] < entry.accepted and not (entry.is_cancelled or entry.is_ended):
            return seq - entry.accepted + item[1]
    return 0


async def recent(
    bus: Bus, function: str, limit: int, is_listed: Callable[[str], bool] = lambda function: True
) -> list[MapEntry]:
    """Return the maps of a function (``*``: of all listed ones) in their current state, newest submission first."""
    logs = await streams.messages_per_subject(bus, subjects.ASYNC, subjects.map_log(function, "*"))
    maps = (subjects.map_of_log(log) for log in logs)
    ids = sorted((map_id for owner, map_id in maps if is_listed(owner)), reverse=True)  # ids start with the time
    entries = await asyncio.gather(*(last(bus, map_id) for map_id in ids[:limit]))
    return [logged.entry for logged in entries if logged is not None]


async def count_ended(bus: Bus, entry: MapEntry) -> int:
    """Count a map's items that have a record: ended items, and the few that wait for another attempt."""
    return await streams.count(bus, subjects.RESULTS, subjects.map_results(entry.function, entry.id))


def _decode_entry(message: StoredMessage) -> Logged:
    return Logged(message.seq, _entry.decode(message.payload))
