"""End submitted calls that no runner will end. Runners read a queue only while its function has workers.

Every few seconds the controller's leader checks the head of each queue and one more part of it, from one end to the
other. So a long queue costs no more per round than a short queue. It ends the calls that `reap_rules` selects. It also
removes calls that have already ended: a gateway or runner may end a call and die before it removes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.submitted import reap_rules
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import queue_position

log = logging.getLogger(__name__)

_INTERVAL_S: Final = 5.0
_HEAD_BATCH: Final = 16
_SCAN_BATCH: Final = 64
_MIN_AGE_S: Final = 10.0  # until then, the process that ended a call is expected to remove it


class Reaper:
    def __init__(self, bus: Bus, registry: Registry, clock: Clock, *, leads: Callable[[], bool]) -> None:
        self._bus = bus
        self._registry = registry
        self._clock = clock
        self._leads = leads
        self._scan_from: dict[str, int] = {}  # queue → sequence at which the scan continues

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            with log_failures("reaping queued calls"):
                if self._leads() and (ended := await self.step()):
                    log.info("removed %d calls from queues that no runner serves", ended)

    async def step(self) -> int:
        """Check all queues once. Return the number of removed calls."""
        stored = await streams.messages_per_subject(self._bus, subjects.ASYNC, subjects.ASYNC_FILTER)
        self._scan_from = {queue: self._scan_from.get(queue, 1) for queue in stored}
        return sum([await self._reap_queue(queue) for queue in stored])

    async def _reap_queue(self, queue: str) -> int:
        seq, count = 1, 0
        while batch := await queue_position.queued(self._bus, subjects.ASYNC, queue, seq, _HEAD_BATCH):
            removed = await self._reap_batch(batch)
            seq, count = batch[-1][0] + 1, count + removed
            if removed < len(batch):
                break
        scanned = await queue_position.queued(
            self._bus, subjects.ASYNC, queue, max(seq, self._scan_from[queue]), _SCAN_BATCH
        )
        self._scan_from[queue] = scanned[-1][0] + 1 if scanned else 1
        return count + await self._reap_batch(scanned)

    async def _reap_batch(self, batch: list[tuple[int, InvocationMessage]]) -> int:
        return sum(await asyncio.gather(*(self._reap(seq, invocation) for seq, invocation in batch)))

    async def _reap(self, seq: int, invocation: InvocationMessage) -> bool:
        """End or remove one call. False if it may go on waiting or running."""
        registry, now = self._registry, self._clock.time()
        exists = invocation.function in registry.functions
        revision = registry.revisions.get(invocation.function, {}).get(invocation.revision)
        spec = None if revision is None or not exists else revision.spec
        if (outcome := reap_rules.verdict(invocation, spec, now)) is not None:
            # True if only the start is overdue: a second delivery would not be.
            is_start_overdue = reap_rules.verdict(invocation, spec, now, delivered=2) is None
            if is_start_overdue:
                queue = queue_position.address(invocation.function, invocation.revision, invocation.queue)
                if await queue_position.was_handed_over(self._bus, queue, seq):
                    return False  # a runner that died may have started it
            return await queue_position.end_unless_held(self._bus, seq, invocation, outcome, now)
        if now - invocation.submitted_at < _MIN_AGE_S:
            return False
        return await queue_position.remove_ended_call(self._bus, seq, invocation)
