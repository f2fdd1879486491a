"""Detect maps that have ended, and record their end.

A gateway that serves the outcomes of a map up to the end records it itself. This module covers the maps that no client
reads, and the maps that run longer than their results are retained.
"""

from __future__ import annotations

from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import MapEntry
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.header_summary import SCAN_LIMIT
from gpufn_platform.queue import map_log
from gpufn_platform.queue.map_log import Logged
from gpufn_platform.queue.records import call_records


class MapCloser:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known_ended: set[str] = set()  # not checked again

    async def step(self) -> int:
        """Check all maps. Return how many have newly ended."""
        logs = await streams.messages_per_subject(self._bus, subjects.ASYNC, subjects.map_log("*", "*"))
        map_ids = {log.rpartition(".")[2] for log in logs}
        self._known_ended &= map_ids
        count = 0
        for map_id in map_ids - self._known_ended:
            newest = await map_log.last(self._bus, map_id)
            if newest is None or not (newest.entry.is_ended or await has_ended(self._bus, newest)):
                continue
            self._known_ended.add(map_id)
            if not newest.entry.is_ended:
                await map_log.end(self._bus, newest)
                count += 1
        return count


async def has_ended(bus: Bus, newest: Logged) -> bool:
    """True if all items have ended, according to their records, or to the queues if some records have expired."""
    entry = newest.entry
    if not (entry.is_closed or entry.is_cancelled):
        return False
    if await map_log.count_ended(bus, entry) >= entry.accepted:
        return entry.is_tried_once or await _none_waiting(bus, entry)
    oldest = await streams.next_message(bus, subjects.ASYNC, subjects.async_queues(entry.function), 1)
    # An item that waits for a retry is queued after the map.
    return oldest is None or (entry.is_tried_once and oldest.seq > newest.seq)


async def _none_waiting(bus: Bus, entry: MapEntry) -> bool:
    """True if no item waits for a retry. All items of the map have a record."""
    if entry.accepted > SCAN_LIMIT:
        return False
    return not await call_records.retrying_items(bus, entry.function, entry.id, limit=1)
