"""Ends submitted calls that no runner will end: runners look at a queue only while its function has workers.

The controller's leader looks, each few seconds, at the head of every queue and at the next part of it, from one end to
the other: a long queue costs no more at a time than a short one. It ends what `reaping` says, and takes out what has
ended already: a call that was cancelled by a gateway that died before it was out, or ended by a runner that did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_gateway.background_loop import tried_again
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.submitted import reap_rules
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import queue_position

log = logging.getLogger(__name__)

_EVERY_S: Final = 5.0
_HEAD: Final = 16
_PART: Final = 64
_UNTOUCHED_S: Final = 10.0  # sooner than this a call that has ended is on its way out by itself


class Reaper:
    """`leads` tells whether the controller of this process leads now."""

    def __init__(self, bus: Bus, registry: Registry, clock: Clock, *, leads: Callable[[], bool]) -> None:
        self._bus = bus
        self._registry = registry
        self._clock = clock
        self._leads = leads
        self._next: dict[str, int] = {}  # queue → sequence that its next part begins at

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            with tried_again("looking for calls that nobody will end"):
                if self._leads() and (ended := await self.step()):
                    log.info("took %d calls out of queues that nobody serves", ended)

    async def step(self) -> int:
        """Returns how many calls are out of their queues."""
        stored = await streams.messages_per_subject(self._bus, subjects.ASYNC, subjects.ASYNC_FILTER)
        self._next = {queue: self._next.get(queue, 1) for queue in stored}
        return sum([await self._look(queue) for queue in stored])

    async def _look(self, queue: str) -> int:
        seq, out = 1, 0
        while batch := await queue_position.queued(self._bus, subjects.ASYNC, queue, seq, _HEAD):
            removed = await self._sift(batch)
            seq, out = batch[-1][0] + 1, out + removed
            if removed < len(batch):
                break
        part = await queue_position.queued(self._bus, subjects.ASYNC, queue, max(seq, self._next[queue]), _PART)
        self._next[queue] = part[-1][0] + 1 if part else 1
        return out + await self._sift(part)

    async def _sift(self, batch: list[tuple[int, InvocationMessage]]) -> int:
        return sum(await asyncio.gather(*(self._take_out(seq, invocation) for seq, invocation in batch)))

    async def _take_out(self, seq: int, invocation: InvocationMessage) -> bool:
        """False for one that goes on waiting, or running."""
        registry, now = self._registry, self._clock.time()
        exists = invocation.function in registry.functions
        revision = registry.revisions.get(invocation.function, {}).get(invocation.revision)
        spec = None if revision is None or not exists else revision.spec
        if (outcome := reap_rules.verdict(invocation, spec, now)) is not None:
            is_start_overdue = reap_rules.verdict(invocation, spec, now, delivered=2) is None  # and nothing else
            if is_start_overdue:
                queue = queue_position.address(invocation.function, invocation.revision, invocation.queue)
                if await queue_position.was_handed_over(self._bus, queue, seq):
                    return False  # a runner that died may have begun with it
            return await queue_position.end_unless_held(self._bus, seq, invocation, outcome, now)
        if now - invocation.submitted_at < _UNTOUCHED_S:
            return False
        return await queue_position.take_out_ended(self._bus, seq, invocation)
