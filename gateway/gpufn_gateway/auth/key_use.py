"""When API keys were last used: kept in memory, and written to the bus at most once per key and five minutes.

A request only adds the id of its key to a set. The recorded time is the time of the next write, so it is up to five
minutes late, and the last minutes before a crash are lost.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from gpufn_gateway.auth.access import Access
from gpufn_gateway.background_loop import log_failures
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock

WRITE_EVERY_S: Final = 300.0

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(float).decode


class KeyUse:
    def __init__(self, records: KeyValue, access: Access, clock: Clock) -> None:
        self._records = records
        self._access = access
        self._clock = clock

    async def run(self) -> None:
        """Write the keys that were used, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            with log_failures("recording the use of API keys"):
                await self.write()

    async def write(self) -> None:
        """Write the time for each key that was used since the last write."""
        now = self._clock.time()
        for key in self._access.take_used():
            await self._records.put(key, _encode(now))

    async def last_used(self) -> dict[str, float]:
        """Return the time of the last use by key, in unix seconds; keys used since the last write have the present
        time."""
        stored = {entry.key: _decode(entry.value) for entry in await self._records.entries()}
        return stored | dict.fromkeys(self._access.used, self._clock.time())

    async def forget(self, key: str) -> None:
        """Remove the record of a deleted key."""
        if await self._records.get(key) is not None:
            await self._records.delete(key)
