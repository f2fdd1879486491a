"""Submitted calls that were ended elsewhere while this runner was without the bus: who cancels says it once, and what
runs for nobody could go on for hours. So after each reconnect the records of those that run here are looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from gpufn_core.errors import GpufnError
from gpufn_platform.bus.connection import Bus
from gpufn_platform.queue import call_records
from gpufn_runtime.runner.attempts.attempt import Attempt

log = logging.getLogger(__name__)


class MissedEnds:
    """`running` are the attempts, by invocation; `cancel(invocation)` ends one."""

    def __init__(self, bus: Bus, running: Mapping[str, Attempt], cancel: Callable[[str], None]) -> None:
        self._bus = bus
        self._running = running
        self._cancel = cancel
        self._is_due = False
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._bus.on_reconnect(self._on_reconnect)

    def tick(self) -> None:
        if self._is_due and self._bus.connected and (self._looking is None or self._looking.done()):
            self._is_due = False
            self._looking = asyncio.get_running_loop().create_task(self._look(), name="calls that were ended elsewhere")

    def _on_reconnect(self) -> None:
        self._is_due = True

    async def _look(self) -> None:
        for invocation, attempt in list(self._running.items()):
            if not attempt.is_submitted:
                continue
            try:
                found = await call_records.record_of(self._bus, invocation)
            except GpufnError as error:
                log.info("whether calls were ended elsewhere is looked up again: %s", error)
                self._is_due = True
                return
            if found is not None and found[0].state.ended and self._running.get(invocation) is attempt:
                self._cancel(invocation)
