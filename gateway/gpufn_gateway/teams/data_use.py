"""The bytes that a team keeps in queues, dicts and stored values. Only teams with a limit of storage are counted.

What is stored is added at once. What is removed, and what other gateways store, shows at the next count. A count reads
the headers of the team's items and entries; it comes at most every `_COUNT_EVERY_S`, and takes at most a tenth of the
time.
"""

from __future__ import annotations

import asyncio
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
_PART_OF_TIME: Final = 10
_SIZE: Final = "Nats-Msg-Size"  # of the payload that the server left out


class _Count(msgspec.Struct):
    bytes: int
    due_at: float  # monotonic: when to count again


class DataUse:
    def __init__(self, bus: Bus, dicts: KeyValue, clock: Clock) -> None:
        self._bus = bus
        self._dicts = dicts
        self._clock = clock
        self._counts: dict[str, _Count] = {}
        self._lock = asyncio.Lock()

    def add(self, team: Team, size: int) -> None:
        """Add what is being stored."""
        if (count := self._counts.get(team.name)) is not None:
            count.bytes += size

    async def of(self, team: Team) -> int:
        """Return the bytes of a team: an upper bound for what this gateway has stored. Raises BusUnavailable."""
        async with self._lock:
            now = self._clock.monotonic()
            count = self._counts.get(team.name)
            if count is None or now >= count.due_at:
                counted = await self._count(team)
                took_s = self._clock.monotonic() - now
                due_at = now + took_s + max(_COUNT_EVERY_S, _PART_OF_TIME * took_s)
                self._counts[team.name] = count = _Count(counted, due_at)
            return count.bytes

    async def _count(self, team: Team) -> int:
        items = await streams.messages_per_subject(self._bus, subjects.QUEUES, subjects.QUEUES_FILTER)
        queues = [subject for subject in items if team.has(subjects.queue_name(subject))]
        names = {key.rpartition(".")[0] for key in await self._dicts.keys()}
        dicts = [f"{self._dicts.subject(name)}.*" for name in names if team.has(name)]
        total = await self._stored(subjects.QUEUES, queues) + await self._stored(self._dicts.stream, dicts)
        tag = value_tag(team.name)
        values = await object_store.blobs(self._bus, subjects.VALUES)
        return total + sum(value.size for value in values if team_of_value(value.digest) == tag)

    async def _stored(self, stream: str, filters: Iterable[str]) -> int:
        total = 0
        for each in filters:
            messages = await ordered_reader.collect(self._bus, stream, each, since_seq=1, headers_only=True)
            total += sum(int(message.headers.get(_SIZE, 0)) for message in messages)
        return total
