"""Counts of the items of maps that have a dead letter, for the status of maps, which clients request every second."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final, NamedTuple

from gpufn_core.ids import item_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.limits import DEAD_LETTERS_AT_ONCE
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue.records import dead_letters

_FRESH_S: Final = 1.0
_MAX_FUNCTIONS: Final = 256


class _Counted(NamedTuple):
    at: float
    mark: tuple[int, int]
    by_map: Counter[str]


class FailedItems:
    """The counts of each function are kept. They are read again once dead letters have changed, at most every
    second."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._counted: dict[str, _Counted] = {}
        self._reading = asyncio.Lock()  # one request reads, and the others use its counts

    async def by_map(self, function: str) -> Counter[str]:
        """Count the newest dead letters of a function (``*``: of all) that are items of maps, by map."""
        async with self._reading:
            now, known = self._clock.monotonic(), self._counted.pop(function, None)
            if known is None or now - known.at >= _FRESH_S:
                mark = await streams.change_mark(self._bus, subjects.DEAD_LETTERS)
                is_same = known is not None and known.mark == mark
                known = _Counted(now, mark, known.by_map if known and is_same else await self._read(function))
            self._counted[function] = known
            if len(self._counted) > _MAX_FUNCTIONS:
                del self._counted[next(iter(self._counted))]
            return known.by_map

    async def _read(self, function: str) -> Counter[str]:
        letters = await dead_letters.recent(self._bus, function, DEAD_LETTERS_AT_ONCE)
        return Counter(item[0] for letter in letters if (item := item_of(letter.id)) is not None)
