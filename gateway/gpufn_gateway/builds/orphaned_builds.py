"""Builds that nobody takes, or goes on with: their records say so, until a builder for their DeviceKind runs. And those
that are in no queue, for their gateway died when they had a record and nothing more: they are queued.

Every gateway has one of these and the controller's leader acts. Builders answer it, also while they build: what their
queue tells is no help, for a delivery to a builder that has died counts as held until the next one comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from gpufn_core.domain.device import DeviceType
from gpufn_core.domain.engine import CPU_KIND, Build, BuildState
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.background_loop import tried_again
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.functions.registry import Registry
from gpufn_platform.bus.connection import Bus, NoResponders
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

SOON_S: Final = 3.0  # what has waited for less may be about to be taken
_TICK_S: Final = 1.0
_ANSWER_S: Final = 2.0


class Unattended:
    """`leads` tells whether the controller of this process leads now."""

    def __init__(self, bus: Bus, builds: Builds, registry: Registry, clock: Clock, leads: Callable[[], bool]) -> None:
        self._bus = bus
        self._builds = builds
        self._registry = registry
        self._clock = clock
        self._leads = leads
        self._silent_since: dict[str, float] = {}  # DeviceKinds that no builder answered for, by our own clock

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
            if not build.state.ended and self._clock.time() - build.created_at >= SOON_S:
                by_device.setdefault(build.device, []).append(build)
        self._silent_since = {each: since for each, since in self._silent_since.items() if each in by_device}
        for device, builds in by_device.items():
            await self._queue_lost(device, builds)
            has_builder = await self._has_builder(device)
            for each in builds if has_builder is not None else ():
                found = self._builds.known.get(each.id)  # it may have ended while its builder was asked for
                if found is not None and not found.state.ended and has_builder == found.detail.startswith(why(device)):
                    detail = "" if has_builder else why(device) + there(self._registry.live_nodes())
                    await self._builds.tell(found.id, detail)

    async def _queue_lost(self, device: str, builds: list[Build]) -> None:
        """A queue has each of its builds until that has ended."""
        queue = subjects.build_queue(device)
        queued = (await streams.messages_per_subject(self._bus, subjects.BUILD, queue)).get(queue, 0)
        for build in builds if queued < len(builds) else ():
            if build.state is BuildState.PENDING:
                log.warning("build %s of %s may be in no queue: it is queued again", build.id, device)
                await self._builds.queue(build)

    async def _has_builder(self, device: str) -> bool | None:
        """None for a while: it may be starting again, or be without the bus for a moment."""
        try:
            await self._bus.request(subjects.builders(device), timeout_s=_ANSWER_S)
        except NoResponders:
            since = self._silent_since.setdefault(device, self._clock.monotonic())
            return False if self._clock.monotonic() - since >= SOON_S else None
        self._silent_since.pop(device, None)
        return True


def why(device: str) -> str:
    return f"no builder runs for {device}: "


def there(nodes: Iterable[NodeReport]) -> str:
    """What could be built for: the name may have been mistyped."""
    devices = [device for report in nodes for device in report.devices]
    kinds = {device.kind if device.type is DeviceType.GPU else CPU_KIND for device in devices}
    return f"the live nodes have {', '.join(sorted(kinds))}" if kinds else "there is no live node"
