"""Collection of the stored arguments of submitted calls.

A runner removes the arguments of a call that it has ended. This module removes the others: of calls that ended in
another way (cancelled, expired, deleted), of dropped dead letters, and of calls that were not accepted because their
gateway died. Arguments of calls that a client waits for expire without it (`gpufn_platform.queue.large_bodies`).
"""

from __future__ import annotations

import logging
from typing import Final

from gpufn_core.ids import item_of
from gpufn_core.protocol import subjects
from gpufn_gateway.garbage_collection.rules import YOUNG_S
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import large_bodies, map_log
from gpufn_platform.queue.records import call_records, dead_letters

log = logging.getLogger(__name__)

_SETTLED_S: Final = 600.0  # earlier, the call may not be accepted yet, or its dead letter may not be stored yet


class ArgumentFiles:
    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def step(self) -> None:
        """Check all of them once."""
        now, bucket = self._clock.time(), subjects.ARGUMENT_FILES
        await object_store.remove_unfinished(self._bus, bucket, now - YOUNG_S)
        removed = size = 0
        for blob in await object_store.blobs(self._bus, bucket):
            owner = blob.digest.partition(".")[0]
            if (
                blob.put_at > now - _SETTLED_S
                or large_bodies.expires_by_itself(owner)
                or await self._is_needed(owner, now)
            ):
                continue
            if await object_store.remove(self._bus, bucket, blob):
                removed, size = removed + 1, size + blob.size
        if removed:
            log.info("removed the arguments of %d calls that have ended: %d bytes", removed, size)

    async def _is_needed(self, invocation: str, now: float) -> bool:
        entry = await call_records.read(self._bus, invocation)
        if entry is None and await self._is_item_of_open_map(invocation):
            return True
        if entry is not None:
            record, _ = entry
            if not record.state.ended or (record.ended_at or now) > now - _SETTLED_S:
                return True
            if not record.state.leaves_dead_letter:
                return False
        return await dead_letters.is_kept(self._bus, invocation)

    async def _is_item_of_open_map(self, invocation: str) -> bool:
        """Return whether it is an item of an open map. It may wait in a queue whose position is no longer known
        (`gpufn_platform.queue.map_log`)."""
        if (item := item_of(invocation)) is None or (newest := await map_log.last(self._bus, item[0])) is None:
            return False
        return item[1] < newest.entry.accepted and not newest.entry.is_ended
