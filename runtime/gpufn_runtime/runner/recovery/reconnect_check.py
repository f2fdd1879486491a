"""Submitted calls that were ended elsewhere while this runner was disconnected from the bus.

A cancel is published only once, and a cancelled call could run for hours. So after each reconnect the records of the
running calls are checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gpufn_core.errors import GpufnError
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue.records import call_records
from gpufn_runtime.runner.core.attempt import Attempt

log = logging.getLogger(__name__)


class ReconnectCheck:
    """Checks records after reconnects. `running` are the attempts, by invocation; `cancel(invocation)` ends one."""

    def __init__(self, bus: Bus, running: Mapping[str, Attempt], cancel: Callable[[str], None]) -> None:
        self._bus = bus
        self._running = running
        self._cancel = cancel
        self._is_due = False
        self._checks = Tasks("calls that were ended elsewhere")

    def start(self) -> None:
        self._bus.on_reconnect(self._on_reconnect)

    def tick(self) -> None:
        if self._is_due and self._bus.connected and not self._checks:
            self._is_due = False
            self._checks.start(self._check())

    def _on_reconnect(self) -> None:
        self._is_due = True

    async def _check(self) -> None:
        for invocation, attempt in list(self._running.items()):
            if not attempt.is_submitted:
                continue
            try:
                record = await call_records.record_of(self._bus, invocation)
            except GpufnError as error:
                log.info("cannot check for calls that were ended elsewhere; retrying: %s", error)
                self._is_due = True
                return
            if record is not None and record[0].state.ended and self._running.get(invocation) is attempt:
                self._cancel(invocation)
