"""Wake up the controller for a call of a function without a ready worker, so that it starts one at once.

Without this the controller would notice the call at its next look at the queues.
"""

from __future__ import annotations

import contextlib
from typing import Final, Protocol

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.target import Target
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import wakeups

_MIN_INTERVAL_S: Final = 0.002  # the controller evaluates the whole function at each wakeup


class Publisher(Protocol):
    def publish(self, subject: str, payload: bytes) -> None: ...


class ColdStartWakeup:
    def __init__(self, bus: Publisher, registry: Registry, clock: Clock) -> None:
        self._bus = bus
        self._registry = registry
        self._clock = clock
        self._published_at: dict[str, float] = {}
        registry.on_deleted.append(self._forget)

    def wake_if_cold(self, target: Target) -> None:
        """Wake up the controller after a call was queued, unless a worker is ready. Never raises."""
        status = self._registry.statuses.get(target.name)
        if status is not None:
            is_serving = status.serving == target.number
            if status.workers.ready if is_serving else status.ready_workers(target.number):
                return
        now = self._clock.monotonic()
        if now - self._published_at.get(target.name, -1.0) >= _MIN_INTERVAL_S:
            self._published_at[target.name] = now
            with contextlib.suppress(BusUnavailable):
                self._bus.publish(subjects.wakeup(target.name), wakeups.payload(target.number))

    def _forget(self, function: str) -> None:
        self._published_at.pop(function, None)
