"""The streams and buckets on the bus, recreated if the bus has lost them after a reconnect."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gpufn_core.errors import GpufnError
from gpufn_core.protocol import subjects
from gpufn_gateway.buckets import Buckets
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.queue import large_bodies

log = logging.getLogger(__name__)

_RETRY_S: Final = 0.25


class Storage:
    def __init__(self, bus: Bus, buckets: Buckets) -> None:
        self._bus = bus
        self._buckets = buckets
        self._task: asyncio.Task[None] | None = None
        self.is_ready = False
        bus.on_reconnect(self._on_reconnect)

    async def ensure(self) -> None:
        """Create the missing streams and buckets. Raises GpufnError if the bus cannot store them."""
        await streams.ensure_streams(self._bus)
        for bucket in (subjects.BUNDLES, subjects.MODEL_FILES, subjects.ENGINE_FILES, subjects.VOLUME_FILES):
            await object_store.ensure_bucket(self._bus, bucket)
        await self._buckets.ensure()
        await large_bodies.ensure_buckets(self._bus)
        self.is_ready = True

    def _on_reconnect(self) -> None:
        self.is_ready = False
        self._task = asyncio.ensure_future(self._recreate())

    async def _recreate(self) -> None:
        while not self.is_ready and self._bus.connected:
            try:
                await self.ensure()
            except GpufnError as error:
                log.warning("the streams could not be created yet: %s", error)
                await asyncio.sleep(_RETRY_S)
            except Exception:  # keep going: there is no other attempt before the next reconnect
                log.exception("creating the streams failed; retrying")
                await asyncio.sleep(_RETRY_S)
