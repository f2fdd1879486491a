"""The bytes that a team keeps in queues, dicts and stored values. Only teams with a limit of storage are counted.

A new value is added at once. An item that was removed, or that another gateway has stored, shows at the next count. The
count comes after `_COUNT_EVERY_S`, or sooner before a value is refused, and takes at most a tenth of the time.

A count reads the headers of entries. The items of a queue cannot be read without taking them: the bus has only their
number. So a gateway keeps the sizes of its own items, and assumes that the smallest items were taken. This is an upper
bound, also if clients take items in another order. Other items count as the newest one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from gpufn_core.domain.team import Team
from gpufn_core.protocol import subjects
from gpufn_core.protocol.data import team_of_value, value_tag
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, ordered_reader, streams
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock

_COUNT_EVERY_S: Final = 10.0
_RECOUNT_AFTER_S: Final = 1.0  # before a value is refused
_PART_OF_TIME: Final = 10
_STEP_BYTES: Final = 1 << 10  # sizes of items are rounded up
_SIZE: Final = "Nats-Msg-Size"  # of the payload that the server left out


class _Count(msgspec.Struct):
    bytes: int
    counted_at: float  # monotonic
    took_s: float


class DataUse:
    def __init__(self, bus: Bus, dicts: KeyValue, clock: Clock) -> None:
        self._bus = bus
        self._dicts = dicts
        self._clock = clock
        self._counts: dict[str, _Count] = {}
        self._items: dict[str, Counter[int]] = {}  # by queue: items by size
        self._lock = asyncio.Lock()

    def add(self, team: Team, size: int) -> None:
        """Count the bytes of an upload in progress."""
        if (count := self._counts.get(team.name)) is not None:
            count.bytes += size

    def add_item(self, team: Team, queue: str, size: int) -> None:
        """Add an item that is being put."""
        rounded = -(-max(size, 1) // _STEP_BYTES) * _STEP_BYTES
        self._items.setdefault(queue, Counter())[rounded] += 1
        self.add(team, rounded)

    async def of(self, team: Team, *, before_refusal: bool = False) -> int:
        """Return the bytes of a team: an upper bound for the data that this gateway has stored. Raises
        BusUnavailable."""
        async with self._lock:
            now = self._clock.monotonic()
            count = self._counts.get(team.name)
            least_s = _RECOUNT_AFTER_S if before_refusal else _COUNT_EVERY_S
            if count is None or now - count.counted_at >= max(least_s, _PART_OF_TIME * count.took_s):
                counted, ended_at = await self._count(team), self._clock.monotonic()
                self._counts[team.name] = count = _Count(counted, ended_at, ended_at - now)
            return count.bytes

    async def _count(self, team: Team) -> int:
        names = {key.rpartition(".")[0] for key in await self._dicts.keys()}
        dicts = [f"{self._dicts.subject(name)}.*" for name in names if team.has(name)]
        total = await self._in_queues(team) + await self._stored(self._dicts.stream, dicts)
        tag = value_tag(team.name)
        values = await object_store.blobs(self._bus, subjects.VALUES)
        return total + sum(value.size for value in values if team_of_value(value.digest) == tag)

    async def _in_queues(self, team: Team) -> int:
        numbers = await streams.messages_per_subject(self._bus, subjects.QUEUES, subjects.QUEUES_FILTER)
        queues = {subjects.queue_name(subject): number for subject, number in numbers.items()}
        for name in [name for name in self._items if name not in queues]:
            del self._items[name]
        total = 0
        for name in filter(team.has, queues):
            known = self._items.get(name, Counter())
            _remove_smallest(known, known.total() - queues[name])
            total += sum(size * count for size, count in known.items())
            if (others := queues[name] - known.total()) > 0:
                newest = await streams.last_message(self._bus, subjects.QUEUES, subjects.queue(name))
                total += others * (0 if newest is None else len(newest.payload))
        return total

    async def _stored(self, stream: str, filters: Iterable[str]) -> int:
        total = 0
        for each in filters:
            messages = await ordered_reader.collect(self._bus, stream, each, since_seq=1, headers_only=True)
            total += sum(int(message.headers.get(_SIZE, 0)) for message in messages)
        return total


def _remove_smallest(sizes: Counter[int], count: int) -> None:
    """
    >>> sizes = Counter({1024: 2, 4096: 1})
    >>> _remove_smallest(sizes, 2)
    >>> sizes
    Counter({4096: 1})
    """
    for size in sorted(sizes):
        removed = min(count, sizes[size])
        if removed <= 0:
            return
        count -= removed
        sizes[size] -= removed
        if not sizes[size]:
            del sizes[size]
