"""A node that consists of its reports only: GPUs with metrics that a test changes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any, Self

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType, Health, Share
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.domain.worker import Assignment
from gpufn_core.errors import GpufnError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import (
    DeviceReport,
    FunctionTotals,
    NodeReport,
    ProcessReport,
    RunnerReport,
    TotalsReport,
)
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import KeyValue

NODE = "stand-in"
FULL = DeviceMetrics(
    uuid="GPU-1", utilisation=0.5, memory_busy=0.4, encoder=0.0, decoder=0.0, memory_total_bytes=80 << 30,
    memory_used_bytes=20 << 30, memory_reserved_bytes=1 << 30, temperature_c=60, temperature_limit_c=92, fan=0.3,
    power_w=300.0, power_limit_w=700.0, energy_joules=1000.0, sm_clock_mhz=1410, sm_clock_max_mhz=1980,
    memory_clock_mhz=2619, clock_limits=("power",), performance_state=0, ecc_corrected=0, ecc_uncorrected=0,
    rows_remapped_corrected=0, rows_remapped_uncorrected=0, rows_pending=False, rows_failed=False,
    recovery_action="none", pcie_generation=5, pcie_width=16, pcie_replays=0, pcie_sent_bytes_per_s=10**9,
    pcie_received_bytes_per_s=10**9, nvlink_sent_bytes=10**9, nvlink_received_bytes=10**9, xids={"13": 1}, last_xid=13,
    mps_clients=1,
)  # fmt: skip


class GpuNode:
    """Reports each second. `metrics`, `health` and `functions` may be changed at any time."""

    def __init__(self, bus_url: str) -> None:
        self._bus_url = bus_url
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.metrics: dict[str, Any] = {}
        self.health, self.health_reason = Health.HEALTHY, ""
        self.functions = 1  # with totals
        self.dropped_lines_per_s = 0
        self.has_small_share = False
        self._rounds = self._dropped = 0

    async def _run(self) -> None:
        bus = await Bus.connect(self._bus_url, name=NODE)
        assignments = KeyValue(bus, subjects.ASSIGNMENTS)
        started_at, is_shared = time.time(), False
        while not self._stopped.is_set():
            with contextlib.suppress(GpufnError):  # the bus may be stopped
                self._report(bus, started_at)
                if self.has_small_share is not is_shared:
                    is_shared = await self._share(assignments)
            await asyncio.sleep(1)
        await bus.close()

    def _report(self, bus: Bus, started_at: float) -> None:
        self._rounds, now = self._rounds + 1, time.time()
        self._dropped += self.dropped_lines_per_s
        metrics = {name: getattr(FULL, name) for name in FULL.__struct_fields__}
        metrics |= {"energy_joules": 300.0 * self._rounds, "nvlink_sent_bytes": 10**9 * self._rounds, **self.metrics}
        bus.publish(subjects.device_report(NODE), encode(DeviceReport(NODE, now, (DeviceMetrics(**metrics),))))
        first, second = (Device(uuid, DeviceType.GPU, "NVIDIA H100", 79 << 30) for uuid in ("GPU-1", "GPU-2"))
        first = msgspec.structs.replace(first, health=self.health, health_reason=self.health_reason)
        pool = Device(f"cpu-{NODE}", DeviceType.CPU, "no CPU", 0)  # so that no worker is placed there
        process = ProcessReport("w-1", "raises", 1, 1, now, gpus_busy=0.5, gpu_bytes={"GPU-1": 20 << 30})
        report = NodeReport(NODE, now, (pool, first, second), processes=(process,))
        bus.publish(subjects.node_report(NODE), encode(report))
        bus.publish(subjects.runner_report(NODE), encode(RunnerReport(NODE, "r", now)))
        totals = tuple(
            FunctionTotals(f"raises{number or ''}", self._rounds, gpu_seconds=0.5 * self._rounds)
            for number in range(self.functions)
        )
        totals_report = TotalsReport(NODE, "r", started_at, now, totals, self._dropped)
        bus.publish(subjects.totals_report(NODE), encode(totals_report))

    async def _share(self, assignments: KeyValue) -> bool:
        """Begin or end the lease of a worker on a part of both GPUs."""
        for gpu in ("GPU-1", "GPU-2"):
            worker = f"w-{gpu.lower()}"
            key = subjects.assignment_key(NODE, worker)
            if self.has_small_share:
                share = DeviceShare(
                    cpu_device=f"cpu-{NODE}", cores=0.0, memory_bytes=0, gpus=(gpu,), mode=Share.MPS, vram_bytes=1 << 30
                )
                record = Assignment(
                    worker=worker,
                    node=NODE,
                    function="ghost",
                    revision=1,
                    share=share,
                    epoch=1,
                    created_at=time.time(),
                )
                await assignments.put(key, encode(record))
            else:
                await assignments.delete(key)
        return self.has_small_share

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(10)
