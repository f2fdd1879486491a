"""Collection of the stored arguments of submitted calls.

A runner removes the arguments of a call that it has ended. This module removes the others: of calls that ended in
another way (cancelled, expired, deleted), of dead letters that were dropped, and of calls that were not accepted
because their gateway died. Arguments of calls that a client waits for expire by themselves (`gpufn.bus.bodies`).
"""

from __future__ import annotations

import logging
from typing import Final

from gpufn.bus import bodies, dead_letters, maps, objects, records
from gpufn.bus.connection import Bus
from gpufn.clock import Clock
from gpufn.ids import item_of
from gpufn.protocol import subjects
from gpufn_gateway.usage import YOUNG_S

log = logging.getLogger(__name__)

_SETTLED_S: Final = 600.0  # sooner the call may not be accepted yet, or its dead letter not be stored


class ArgumentFiles:
    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock

    async def step(self) -> None:
        """Look at all of them once."""
        now, bucket = self._clock.time(), subjects.ARGUMENT_FILES
        await objects.remove_unfinished(self._bus, bucket, now - YOUNG_S)
        removed = size = 0
        for blob in await objects.blobs(self._bus, bucket):
            owner = blob.digest.partition(".")[0]
            if blob.put_at > now - _SETTLED_S or bodies.expires_by_itself(owner) or await self._is_needed(owner, now):
                continue
            if await objects.remove(self._bus, bucket, blob):
                removed, size = removed + 1, size + blob.size
        if removed:
            log.info("removed the arguments of %d calls that have ended: %d bytes", removed, size)

    async def _is_needed(self, invocation: str, now: float) -> bool:
        found = await records.read(self._bus, invocation)
        if found is None and await self._is_item_of_open_map(invocation):
            return True
        if found is not None:
            record, _ = found
            if not record.state.ended or (record.ended_at or now) > now - _SETTLED_S:
                return True
            if not record.state.leaves_dead_letter:
                return False
        return await dead_letters.is_kept(self._bus, invocation)

    async def _is_item_of_open_map(self, invocation: str) -> bool:
        """It may wait in a queue, and its place be forgotten (`gpufn.bus.maps`)."""
        if (item := item_of(invocation)) is None or (newest := await maps.last(self._bus, item[0])) is None:
            return False
        return item[1] < newest.entry.accepted and not newest.entry.is_ended
