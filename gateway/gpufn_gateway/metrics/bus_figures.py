"""Sizes and limits of the bus, and the oldest waiting call of each function. The leader reads them every ten seconds.

A figure that could not be read is absent until it can be read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from gpufn_core.errors import PlatformError
from gpufn_core.protocol import subjects
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.telemetry import Fill
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

INTERVAL_S: Final = 10.0
_MAX_QUEUES: Final = 200  # whose oldest call is looked up in a round
_OBJECT_STORE: Final = "OBJ_"
_OWN: Final = ("GPUFN_", "KV_gpufn_", "OBJ_gpufn_")
_TIMEOUT_S: Final = 5.0


class Reading(msgspec.Struct, frozen=True):
    """The result of one round. `waits` has the time of the oldest waiting call of each function, in unix seconds."""

    account: dict[str, Any]
    streams: tuple[dict[str, Any], ...]
    waits: dict[str, float]
    response_s: float


class BusFigures:
    """`functions` returns the names of all functions."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        *,
        leads: Callable[[], bool],
        functions: Callable[[], Iterable[str]],
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._leads = leads
        self._functions = functions
        self._reading: Reading | None = None
        self._is_failing = False

    async def run(self) -> None:
        """Read the figures while this gateway leads, until cancelled."""
        while True:
            if self._leads():
                await self.read()
            else:
                self._reading = None
            await asyncio.sleep(INTERVAL_S if self._leads() else 1.0)

    async def read(self) -> None:
        try:
            async with asyncio.timeout(INTERVAL_S):
                self._reading = await self._read()
        except (PlatformError, TimeoutError) as error:
            self._reading = None
            if not self._is_failing:
                log.warning("the sizes of the bus cannot be read, so /metrics lacks them: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    async def _read(self) -> Reading:
        started_at = self._clock.monotonic()
        account = await self._bus.js("INFO", timeout_s=_TIMEOUT_S)
        response_s = self._clock.monotonic() - started_at
        listed: list[dict[str, Any]] = []
        while True:
            page = await self._bus.js("STREAM.LIST", {"offset": len(listed)}, timeout_s=_TIMEOUT_S)
            listed += page.get("streams") or ()
            if not page.get("streams") or len(listed) >= page["total"]:
                break
        return Reading(account, tuple(listed), await self._oldest_waits(), response_s)

    async def _oldest_waits(self) -> dict[str, float]:
        """Return when the oldest call arrived that was not delivered to a runner yet, by function."""
        waits: dict[str, float] = {}
        queues: dict[tuple[str, str], str] = {}  # the filter by stream and consumer
        for stream, subject in ((subjects.SYNC, subjects.SYNC_FILTER), (subjects.ASYNC, subjects.ASYNC_FILTER)):
            for name in await streams.messages_per_subject(self._bus, stream, subject):
                (function, revision), priority = subjects.queue_owner(name), subjects.queue_class(name)
                if stream == subjects.SYNC:
                    consumer = subjects.sync_consumer(function, revision, priority)
                    queues[stream, consumer] = subjects.sync_queue(function, revision, priority)
                else:
                    consumer = subjects.async_consumer(function, revision, priority)
                    queues[stream, consumer] = subjects.async_queue(function, revision, priority, "*")
        for (stream, consumer), queue in list(queues.items())[:_MAX_QUEUES]:
            progress = await streams.consumed(self._bus, stream, consumer)
            after = 0 if progress is None else progress.taken
            if (oldest := await streams.next_message(self._bus, stream, queue, after + 1)) is not None:
                function, _ = subjects.queue_owner(queue)
                waits[function] = min(oldest.time, waits.get(function, oldest.time))
        return waits

    def snapshot(self) -> Fill:
        reading, functions, now = self._reading, tuple(self._functions()), self._clock.time()
        return lambda families: None if reading is None else _fill(families, reading, functions, now)


def _fill(families: Families, reading: Reading, functions: Iterable[str], now: float) -> None:
    add = families.add
    add("gpufn_bus_response_seconds", reading.response_s)
    limits = reading.account.get("limits") or {}
    for storage, used, limit in (("file", "storage", "max_storage"), ("memory", "memory", "max_memory")):
        add("gpufn_bus_storage_bytes", reading.account.get(used), storage)
        add("gpufn_bus_storage_limit_bytes", _limit(limits.get(limit)), storage)
    for stream in reading.streams:
        if stream["config"]["name"].startswith(_OWN):  # the account may have streams of others
            _add_stream(families, stream)
    for function in functions:
        at = reading.waits.get(function, now)
        add("gpufn_function_oldest_wait_seconds", max(0.0, now - at), function)


def _add_stream(families: Families, stream: dict[str, Any]) -> None:
    config, state = stream["config"], stream["state"]
    name: str = config["name"]
    families.add("gpufn_bus_stream_bytes", state["bytes"], name)
    families.add("gpufn_bus_stream_messages", state["messages"], name)
    families.add("gpufn_bus_stream_limit_bytes", _limit(config.get("max_bytes")), name)
    replicas = (stream.get("cluster") or {}).get("replicas") or ()
    if replicas:
        families.add("gpufn_bus_stream_lag", max(replica.get("lag", 0) for replica in replicas), name)
    if name.startswith(_OBJECT_STORE):
        families.add("gpufn_object_store_bytes", state["bytes"], name.removeprefix(_OBJECT_STORE))


def _limit(value: int | None) -> int | None:
    """Return a limit; the server writes "none" as -1 or 0."""
    return value if value is not None and value > 0 else None
