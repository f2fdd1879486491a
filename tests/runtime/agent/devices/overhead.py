"""Cost of sampling eight GPUs each second: `python -m tests.runtime.agent.devices.overhead`.

The GPUs are fakes, so the result is the agent's share only, without the time that NVML takes.
"""

from __future__ import annotations

import asyncio
import time

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import DeviceReport
from gpufn_platform.process.clock import SystemClock
from gpufn_runtime.agent.devices.nvml import NvmlInventory
from gpufn_runtime.agent.devices.watch import DeviceWatch
from tests.runtime.agent.devices.fake_nvml import FakeGpu, FakeNvml

SECONDS = 10.0


async def main() -> None:
    processes = {1000 + n: 1 << 30 for n in range(4)}
    gpus = [FakeGpu(f"GPU-{n}", processes=processes, clients=processes) for n in range(8)]
    pool = Device("cpu", DeviceType.CPU, "CPU", 1 << 30, 2.0)
    watch = DeviceWatch(NvmlInventory(pool, FakeNvml(*gpus)), SystemClock())
    sent: list[bytes] = []

    def send(metrics: tuple[DeviceMetrics, ...]) -> None:
        sent.append(encode(DeviceReport("node", 0.0, metrics)))
        watch.devices(time.monotonic())

    watch.start(send)
    began = time.process_time()
    await asyncio.sleep(SECONDS)
    busy = (time.process_time() - began) / SECONDS
    watch.stop()
    print(f"{busy:.3%} of a core, {len(sent)} samples, {len(sent[-1])} bytes each")


if __name__ == "__main__":
    asyncio.run(main())
