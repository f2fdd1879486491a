"""Samples the reports of the platform each second, and divides the samples into slots of ten seconds.

Every gateway samples, so a new leader has the slots and events that the former one did not publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections import deque
from typing import Final

import msgspec

from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import PlatformError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import WorkerEvent
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.history.blocks import SECONDS_10, Block, Event, decode_block, encode_blocks
from gpufn_gateway.history.changes import Changes
from gpufn_gateway.history.collector import Collector
from gpufn_gateway.history.fields import Points, merge_points
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

_CLOSE_AFTER_S: Final = 3.0  # after the end of a slot: other gateways report their calls
_SETTLED_AFTER_S: Final = 15.0  # by then all nodes have reported to a new gateway
_TAKEOVER_S: Final = 60.0  # kept by a gateway that may become the leader
_MAX_ENDED: Final = 60  # slots that wait until the stream can be written
_MAX_EVENTS: Final = 1_000

_worker_event = msgspec.msgpack.Decoder(WorkerEvent)


class Slot(msgspec.Struct):
    """Ten seconds that have ended. `closes_at` is monotonic: until then, calls of other gateways are added."""

    number: int
    points: Points
    seconds: int  # recorded ones
    closes_at: float


class Sampler:
    def __init__(self, bus: Bus, registry: Registry, telemetry: Telemetry, clock: Clock, name: str) -> None:
        self._bus = bus
        self._registry = registry
        self._telemetry = telemetry
        self._clock = clock
        self._name = name
        self._collector = Collector()
        self._changes = Changes()
        self._started_at = clock.monotonic()
        self._slot = int(clock.time()) // SECONDS_10
        self._seconds = 0  # recorded in this slot
        self._sampled_at = int(clock.time())
        self.ended: deque[Slot] = deque(maxlen=_MAX_ENDED)
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)

    def listen(self) -> None:
        self._registry.on_runner_report.append(self._collector.on_runner_report)
        self._bus.subscribe(subjects.WORKER_EVENTS, decoded(_worker_event, self._on_worker_event))
        self._bus.subscribe(subjects.HISTORY_PARTS, self._on_part)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(1.01 - self._clock.time() % 1.0)  # timers may fire early
            try:
                self.sample()
            except Exception:
                log.exception("a sample of the history failed; the next one follows")

    def sample(self) -> None:
        """Add the present state of the reports. End the slot if its time is over."""
        now = self._clock.time()
        seconds = int(now) - self._sampled_at
        if not seconds:
            return
        self._sampled_at = int(now)
        seconds = min(3, seconds) if seconds > 0 else 1  # a late sample counts for the missed ones
        if (slot := int(now) // SECONDS_10) != self._slot:
            self._end_slot(now)
            self._slot = slot
        self._seconds = min(SECONDS_10, self._seconds + seconds)
        registry = self._registry
        statuses = list(registry.statuses) if registry.has_fresh_controller_report() else []
        nodes = registry.live_nodes()
        self._collector.sample(statuses, nodes, registry.device_reports.of, seconds)
        self._changes.on_functions(registry.functions, now)
        self._changes.on_statuses(statuses, now)
        is_settled = self._clock.monotonic() - self._started_at > _SETTLED_AFTER_S
        self._changes.on_nodes(nodes, now, is_settled=is_settled)
        self._changes.on_node_drains(registry.drains, now)
        self.events.extend(self._changes.take())

    def end_now(self) -> None:
        """End the slot before its time. Later seconds of it are added."""
        self._end_slot(self._clock.time())
        for slot in self.ended:
            slot.closes_at = min(slot.closes_at, self._clock.monotonic())

    def forget_old(self) -> None:
        """Forget slots and events that another gateway has published by now."""
        now, wall = self._clock.monotonic(), self._clock.time()
        while self.ended and self.ended[0].closes_at < now - _TAKEOVER_S:
            self.ended.popleft()
        while self.events and abs(self.events[0].at - wall) > _TAKEOVER_S:
            self.events.popleft()

    def _end_slot(self, now: float) -> None:
        calls = self._telemetry.take_recent()
        self._changes.end_slot(now)
        if calls:
            for payload in encode_blocks(SECONDS_10, self._slot, self._name, calls):
                with contextlib.suppress(PlatformError):
                    self._bus.publish(subjects.history_part(self._name), payload)
        self._collector.add(calls)
        closes_at = self._clock.monotonic() + _CLOSE_AFTER_S
        self.ended.append(Slot(self._slot, self._collector.take(), self._seconds, closes_at))
        self._seconds = 0

    def _on_worker_event(self, event: WorkerEvent) -> None:
        self._collector.on_worker_event(event)
        self._changes.on_worker_event(event)

    def _on_part(self, message: Message) -> None:
        """Add the calls that the clients of another gateway waited for."""
        try:
            part = decode_block(message.payload)
        except (*DECODE_ERRORS, zlib.error) as error:
            log.warning("cannot decode a message on %s: %s", message.subject, error)
            return
        if part.gateway != self._name:
            self._add_calls(part)

    def _add_calls(self, part: Block) -> None:
        for slot in self.ended:
            if slot.number == part.slot and slot.closes_at > self._clock.monotonic():
                merge_points(slot.points, part.points)
                return
        self._collector.add(part.points)
