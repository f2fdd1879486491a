"""Usage metering: sums up the run time and GPU seconds of this node's calls, and stores them every few seconds.

`core/busy_time.py` divides a worker's time among its calls. `gpu_s` in `core/attempt.py` multiplies it by the GPUs that
the worker is charged for (`gpus_charged` in `gpufn_core/domain/worker.py`).
`gpu/call_energy.py` divides the energy of a GPU among the calls.

Records are updated by compare-and-set, so that a runner finishing its last calls and its successor both count. A killed
runner loses its usage records since the last write: up to ten seconds' usage.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.domain.usage import STORE_INTERVAL_S, Usage, UsageKey, day_of
from gpufn_core.errors import Conflict, GpufnError
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.gpu.call_energy import CallEnergy

log = logging.getLogger(__name__)

_usage = msgspec.msgpack.Decoder(Usage)


class Meter:
    def __init__(self, records: KeyValue, node: str, clock: Clock) -> None:
        self._records = records
        self._node = node
        self._clock = clock
        self.energy = CallEnergy()
        self._counted: defaultdict[UsageKey, Usage] = defaultdict(Usage)
        self._sent: dict[UsageKey, tuple[Usage, bytes]] = {}  # writes whose success is unknown

    def count(self, message: InvocationMessage, *, is_failed: bool, run_s: float, gpu_s: float) -> None:
        """Count an attempt that has ended."""
        usage = self._usage_of(message)
        usage.calls += 1
        usage.failed += is_failed
        usage.run_s += run_s
        usage.gpu_s += gpu_s

    def count_energy(self, metrics: Iterable[DeviceMetrics], running: Iterable[Attempt]) -> None:
        """Count the energy of the attempts that have ended since the last sample of the GPUs."""
        for message, joules in self.energy.on_sample(metrics, running, self._clock.monotonic()):
            usage = self._usage_of(message)
            usage.joules = joules + (usage.joules or 0.0)
            usage.joules_calls += 1

    async def run(self) -> None:
        """Store the usage regularly until cancelled, and then once more."""
        try:
            while True:
                await asyncio.sleep(STORE_INTERVAL_S)
                await self.store()
        finally:
            await self.store()

    async def store(self) -> None:
        """Store all usage. Usage that cannot be stored now stays for the next time."""
        for key in {**self._sent, **self._counted}:
            try:
                await self._store(key)
            except Conflict:
                log.info("usage of %s was changed by another runner of this node; retrying later", key.function)
            except GpufnError as error:
                log.info("cannot store usage yet: %s", error)
                return

    async def _store(self, key: UsageKey) -> None:
        name = key.record(self._node)
        entry = await self._records.get(name)
        sent = self._sent.pop(key, None)
        if sent is not None and (entry is None or entry.value != sent[1]):
            self._counted[key] += sent[0]
        usage = self._counted.pop(key, None)
        if usage is None:
            return
        previous = Usage() if entry is None else _usage.decode(entry.value)
        value = encode(previous + usage)
        self._sent[key] = usage, value
        if entry is None:
            await self._records.create(name, value)
        else:
            await self._records.update(name, value, entry.revision)
        del self._sent[key]

    def _usage_of(self, message: InvocationMessage) -> Usage:
        """Return the usage to which an attempt that has just ended is added."""
        return self._counted[UsageKey(day_of(self._clock.time()), message.function, message.owner)]
