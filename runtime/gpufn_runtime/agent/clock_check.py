"""Comparison of this node's clock with the NATS server's clock, once a minute."""

from __future__ import annotations

import logging
import math

from gpufn_core.domain import clock_skew
from gpufn_core.errors import GpufnError
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks

log = logging.getLogger(__name__)

_EVERY_S = 60.0
_RETRY_S = 5.0  # while the skew is unknown
_TIMEOUT_S = 2.0


class ClockCheck:
    """Periodic clock comparison. `skew_s` is None while unknown. `stream` is any stream for which this role may request
    STREAM.INFO."""

    def __init__(self, bus: Bus, stream: str, *, node: str, clock: Clock) -> None:
        self._bus = bus
        self._stream = stream
        self._node = node
        self._clock = clock
        self._due_at = -math.inf
        self._is_skewed = False  # as last logged
        self._tasks = Tasks("clock check")
        self.skew_s: float | None = None

    def step(self, now: float) -> None:
        """Start a comparison when it is due. `now` is monotonic."""
        if now >= self._due_at and not self._tasks:
            self._tasks.start(self.measure(now))

    async def measure(self, now: float) -> None:
        sent_at = self._clock.time()
        try:
            server_at = await streams.server_time(self._bus, self._stream, timeout_s=_TIMEOUT_S)
        except GpufnError:
            self.skew_s = None
        else:
            self.skew_s = clock_skew.measure(sent_at, server_at, self._clock.time())
        self._due_at = now + (_RETRY_S if self.skew_s is None else _EVERY_S)
        self._log_change()

    def cancel(self) -> None:
        self._tasks.cancel()

    def _log_change(self) -> None:
        if self.skew_s is None or clock_skew.is_skewed(self.skew_s) == self._is_skewed:
            return
        self._is_skewed = not self._is_skewed
        description = clock_skew.describe(self.skew_s)
        if self._is_skewed:
            log.warning("clock of node %s is %s: %s", self._node, description, clock_skew.REMEDY)
        else:
            log.info("clock of node %s is correct again: %s", self._node, description)
