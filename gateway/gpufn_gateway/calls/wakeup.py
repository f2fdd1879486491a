"""The doorbell for calls of functions that have no worker ready: the controller starts one at once, and not when it
looks at the queues next.
"""

from __future__ import annotations

import contextlib
from typing import Final, Protocol

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_gateway.functions.registry import Registry, Target
from gpufn_platform.process.clock import Clock

_APART_S: Final = 0.002  # the controller looks at the whole function at each ring


class Publisher(Protocol):
    def publish(self, subject: str, payload: bytes) -> None: ...


class Doorbell:
    def __init__(self, bus: Publisher, registry: Registry, clock: Clock) -> None:
        self._bus = bus
        self._registry = registry
        self._clock = clock
        self._rang_at: dict[str, float] = {}
        registry.on_deleted.append(self._forget)

    def ring_if_cold(self, target: Target) -> None:
        """A call of it was queued. Raises nothing: its reply will tell."""
        status = self._registry.statuses.get(target.name)
        if status is not None and status.workers.ready and status.serving == target.number:
            return
        now = self._clock.monotonic()
        if now - self._rang_at.get(target.name, -1.0) >= _APART_S:
            self._rang_at[target.name] = now
            with contextlib.suppress(BusUnavailable):
                self._bus.publish(subjects.doorbell(target.name), b"")

    def _forget(self, function: str) -> None:
        self._rang_at.pop(function, None)
