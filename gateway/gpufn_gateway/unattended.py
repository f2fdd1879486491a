"""Builds that wait though nobody takes them: their records say so, until a builder for their DeviceKind runs.

Every gateway has one of these and the controller's leader acts. A builder that is busy, or starts, counts as one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from gpufn.bus import streams
from gpufn.bus.connection import Bus
from gpufn.clock import Clock
from gpufn.engine import Build, BuildState
from gpufn.protocol import subjects
from gpufn_gateway.builds import Builds
from gpufn_gateway.duty import tried_again

log = logging.getLogger(__name__)

SOON_S: Final = 3.0  # what has waited for less may be about to be taken
_TICK_S: Final = 1.0


class Unattended:
    """`leads` tells whether the controller of this process leads now."""

    def __init__(self, bus: Bus, builds: Builds, clock: Clock, leads: Callable[[], bool]) -> None:
        self._bus = bus
        self._builds = builds
        self._clock = clock
        self._leads = leads

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with tried_again("looking for builders"):
                if self._leads():
                    await self.step()
            await asyncio.sleep(_TICK_S)

    async def step(self) -> None:
        by_device: dict[str, list[Build]] = {}
        for build in self._builds.known.values():
            if build.state is BuildState.PENDING and self._clock.time() - build.created_at >= SOON_S:
                by_device.setdefault(build.device, []).append(build)
        for device, builds in by_device.items():
            queue = await streams.consumed(self._bus, subjects.BUILD, subjects.build_consumer(device))
            has_builder = queue is not None and queue.has_taker
            for build in builds:
                if has_builder == (build.detail == why(device)):
                    await self._builds.tell(build.id, "" if has_builder else why(device))


def why(device: str) -> str:
    return f"no builder runs for {device}; `gpufn nodes` shows the devices that there are"
