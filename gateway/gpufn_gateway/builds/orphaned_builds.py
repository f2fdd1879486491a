"""Detection of orphaned builds.

A build without a builder for its DeviceKind has a note about it in its record, until a builder runs. A pending build
that is in no queue, because its gateway died after recording it, is queued again.

Every gateway runs this, and the controller's leader acts. Builders answer the request even while they build. The state
of their queue does not help: a delivery to a dead builder counts as in progress until it is redelivered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from gpufn_core.domain.devices.device import DeviceType
from gpufn_core.domain.devices.engine import CPU_KIND, Build, BuildState
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.functions.registry import Registry
from gpufn_platform.bus.connection import Bus, NoResponders
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

SOON_S: Final = 3.0  # a build that has waited for less may be taken in a moment
_TICK_S: Final = 1.0
_ANSWER_S: Final = 2.0


class OrphanedBuilds:
    def __init__(self, bus: Bus, builds: Builds, registry: Registry, clock: Clock, leads: Callable[[], bool]) -> None:
        self._bus = bus
        self._builds = builds
        self._registry = registry
        self._clock = clock
        self._leads = leads
        self._silent_since: dict[str, float] = {}  # DeviceKinds without a builder's answer, by our monotonic clock

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with log_failures("looking for builders"):
                if self._leads():
                    await self.step()
            await asyncio.sleep(_TICK_S)

    async def step(self) -> None:
        by_device: dict[str, list[Build]] = {}
        for build in self._builds.known.values():
            if not build.state.ended and self._clock.time() - build.created_at >= SOON_S:
                by_device.setdefault(build.device, []).append(build)
        self._silent_since = {device: since for device, since in self._silent_since.items() if device in by_device}
        for device, builds in by_device.items():
            await self._queue_lost(device, builds)
            has_builder = await self._has_builder(device)
            for each in builds if has_builder is not None else ():
                current = self._builds.known.get(each.id)  # it may have ended during the request
                if current is None or current.state.ended:
                    continue
                text = no_builder_text(device)
                if has_builder == current.detail.startswith(text):
                    detail = "" if has_builder else text + available_kinds(self._registry.live_nodes())
                    await self._builds.set_detail(current.id, detail)

    async def _queue_lost(self, device: str, builds: list[Build]) -> None:
        """Queue pending builds again if the queue is too short. A queue holds a build until the build ends."""
        queue = subjects.build_queue(device)
        queued = (await streams.messages_per_subject(self._bus, subjects.BUILD, queue)).get(queue, 0)
        for build in builds if queued < len(builds) else ():
            if build.state is BuildState.PENDING:
                log.warning("build %s of %s may be in no queue: queueing it again", build.id, device)
                await self._builds.queue(build)

    async def _has_builder(self, device: str) -> bool | None:
        """Return whether a builder answers. None for a few seconds of silence: it may be restarting, or without the
        bus."""
        try:
            await self._bus.request(subjects.builders(device), timeout_s=_ANSWER_S)
        except NoResponders:
            since = self._silent_since.setdefault(device, self._clock.monotonic())
            return False if self._clock.monotonic() - since >= SOON_S else None
        self._silent_since.pop(device, None)
        return True


def no_builder_text(device: str) -> str:
    return f"no builder runs for {device}: "


def available_kinds(nodes: Iterable[NodeReport]) -> str:
    """Name the DeviceKinds that exist: the one of the build may have been mistyped."""
    devices = [device for report in nodes for device in report.devices]
    kinds = {device.kind if device.type is DeviceType.GPU else CPU_KIND for device in devices}
    return f"the live nodes have {', '.join(sorted(kinds))}" if kinds else "there is no live node"
