"""Whether maps have ended, and notes that they have: a gateway that somebody reads one to its end from notes it itself,
and this is for those that nobody reads, and for those that took longer than their results are kept."""

from __future__ import annotations

from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import MapEntry
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.header_summary import MOST_LOOKED_AT
from gpufn_platform.queue import call_records, map_log
from gpufn_platform.queue.map_log import Logged


class EndedMaps:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._ended: set[str] = set()  # not looked at again

    async def step(self) -> int:
        """How many have ended since."""
        logs = await streams.messages_per_subject(self._bus, subjects.ASYNC, subjects.map_log("*", "*"))
        ids = {log.rpartition(".")[2] for log in logs}
        self._ended &= ids
        count = 0
        for map_id in ids - self._ended:
            newest = await map_log.last(self._bus, map_id)
            if newest is None or not (newest.entry.is_ended or await has_ended(self._bus, newest)):
                continue
            self._ended.add(map_id)
            if not newest.entry.is_ended:
                await map_log.end(self._bus, newest)
                count += 1
        return count


async def has_ended(bus: Bus, newest: Logged) -> bool:
    """By its items' records; or, when some are forgotten already, by their places in the queues."""
    entry = newest.entry
    if not (entry.is_closed or entry.is_cancelled):
        return False
    if await map_log.count_ended(bus, entry) >= entry.accepted:
        return entry.is_tried_once or await _none_waits(bus, entry)
    oldest = await streams.next_message(bus, subjects.ASYNC, subjects.async_queues(entry.function), 1)
    # An item that waits for another attempt is in a place behind the map.
    return oldest is None or (entry.is_tried_once and oldest.seq > newest.seq)


async def _none_waits(bus: Bus, entry: MapEntry) -> bool:
    """For another attempt: all its items have a record."""
    if entry.accepted > MOST_LOOKED_AT:
        return False
    return not await call_records.waiting_of_map(bus, entry.function, entry.id, limit=1)
