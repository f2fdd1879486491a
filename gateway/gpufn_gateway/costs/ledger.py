"""Costs of days: reads usage and held time. Days that are over stay in memory.

A year of many functions takes seconds to compute. One thread does this, so calls go on.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final, TypeVar

import msgspec

from gpufn_core.domain.devices.device import DeviceType
from gpufn_core.domain.usage import Usage, UsageKey, day_of, days
from gpufn_gateway.costs.attribution import Cost, DayHeld, Held, UsageRow, costs
from gpufn_gateway.costs.price_file import PriceFile
from gpufn_gateway.costs.prices import Prices, Rates
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.history.blocks import HOUR
from gpufn_gateway.history.collector import OVERVIEW
from gpufn_gateway.history.fields import Field
from gpufn_gateway.history.index import Index
from gpufn_gateway.history.recorder import Recorder
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.process.clock import Clock

T = TypeVar("T")

HELD_DAYS: Final = 30  # in the history
_MAX_CACHED: Final = 400  # days
_LATE_S: Final = 3600.0  # after the end of a day its last usage may still be stored
_FREE: Final = Rates(0.0, 0.0)
_usage: Final = msgspec.msgpack.Decoder(Usage)


class Ledger:
    def __init__(
        self, records: KeyValue, recorder: Recorder, registry: Registry, prices: PriceFile, clock: Clock
    ) -> None:
        self._records = records
        self._recorder = recorder
        self._registry = registry
        self._prices = prices
        self._clock = clock
        self._usage: dict[str, list[UsageRow]] = {}  # of days that are over
        self._held: dict[str, DayHeld] = {}
        self._thread = ThreadPoolExecutor(1, "costs")

    def prices(self) -> Prices | None:
        return self._prices.prices()

    async def query(
        self, wanted: Sequence[str], read: Callable[[Mapping[UsageKey, Cost]], T], *, shares_unused: bool = False
    ) -> T:
        """Return what `read` makes of the costs of these UTC days, in the thread. Without prices all costs are zero.
        Raises RateLimited, PlatformError."""
        prices = self.prices()
        rows = [await self._rows(day) for day in wanted]
        held = {day: await self._held_on(day) for day in wanted}
        kinds = self._gpu_kinds()

        def rates_of(node: str) -> Rates:
            return _FREE if prices is None else prices.rates(node, kinds.get(node, ""))

        fleet = _FREE if prices is None else self._fleet_rates(prices)
        return await self._in_thread(
            lambda: read(costs(chain.from_iterable(rows), held, rates_of, fleet, shares_unused=shares_unused))
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _rows(self, day: str) -> list[UsageRow]:
        if (known := self._usage.get(day)) is not None:
            return known
        is_over = self._is_over(day)
        entries = await self._records.entries(f"{day}.")
        rows = await self._in_thread(lambda: _decode(entries))
        if is_over:
            self._usage[day] = rows
            while len(self._usage) > _MAX_CACHED:
                self._usage.pop(next(iter(self._usage)))
        return rows

    async def _held_on(self, day: str) -> DayHeld:
        if (known := self._held.get(day)) is not None:
            return known
        now = self._clock.time()
        if day not in set(days(day_of(now - HELD_DAYS * 86_400.0), day_of(now))):
            return DayHeld()
        is_over = self._is_over(day)
        first = _start_of(day) // HOUR
        held = await self._recorder.query(lambda index: _read_held(index, first))
        if is_over:
            self._held[day] = held
            while len(self._held) > _MAX_CACHED:
                self._held.pop(next(iter(self._held)))
        return held

    def _is_over(self, day: str) -> bool:
        return day < day_of(self._clock.time() - _LATE_S)

    def _gpu_kinds(self) -> dict[str, str]:
        """Return the name of the GPUs of each live node."""
        return {
            node.node: device.kind
            for node in self._registry.live_nodes()
            for device in node.devices
            if device.type is DeviceType.GPU and not device.parent
        }

    def _fleet_rates(self, prices: Prices) -> Rates:
        """Return the mean rates of the live nodes, by their numbers of GPUs and cores."""
        gpus = cores = gpu_hour = cpu_hour = 0.0
        for node in self._registry.live_nodes():
            for device in node.devices:
                rates = prices.rates(node.node, device.kind)
                if device.type is DeviceType.GPU and not device.parent:
                    gpus, gpu_hour = gpus + 1, gpu_hour + rates.gpu_hour
                elif device.type is DeviceType.CPU:
                    cores, cpu_hour = cores + device.cores, cpu_hour + rates.cpu_hour * device.cores
        return Rates(gpu_hour / gpus if gpus else prices.gpu_hour, cpu_hour / cores if cores else prices.cpu_hour)


def _decode(entries: Iterable[Entry]) -> list[UsageRow]:
    return [
        UsageRow(UsageKey.of_record(entry.key), entry.key.split(".", 3)[3], _usage.decode(entry.value))
        for entry in entries
    ]


def _start_of(day: str) -> int:
    """Return the unix seconds of the start of a UTC day."""
    return int(datetime.datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp())


def _read_held(index: Index, first: int) -> DayHeld:
    gpu_ms: dict[str, int] = {}
    cpu_ms: dict[str, int] = {}
    capacity = 0
    for slot in range(first, first + 24):
        for subject, point in index.points_at(HOUR, slot).items():
            if subject == OVERVIEW:
                capacity += point.get(Field.GPUS, 0)
            elif subject.startswith("function:") and "@" not in subject:
                name = subject.removeprefix("function:")
                gpu_ms[name] = gpu_ms.get(name, 0) + point.get(Field.GPU_HELD_MS, 0)
                cpu_ms[name] = cpu_ms.get(name, 0) + point.get(Field.CPU_HELD_MS, 0)
    functions = {name: Held(gpu_ms[name] / 1000, cpu_ms[name] / 1000) for name in gpu_ms}
    return DayHeld({name: each for name, each in functions.items() if each.gpu_s or each.cpu_s}, float(capacity))
