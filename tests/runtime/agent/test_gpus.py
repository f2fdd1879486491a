"""Agent with GPUs: health in its reports, metrics on the bus, and the effect of faults on workers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pynvml

from gpufn_core.domain.devices.device import Device, DeviceType, Health
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import DeviceReport
from gpufn_runtime.agent.devices.nvml import NvmlInventory
from tests.runtime.agent.devices.fake_nvml import FakeGpu, FakeNvml


def _inventory(node: Any, *gpus: FakeGpu) -> NvmlInventory:
    return NvmlInventory(Device(f"cpu-{node.name}", DeviceType.CPU, "CPU", 4 << 30, 2.0), FakeNvml(*gpus))


def test_metrics_are_sent_apart_from_the_nodes_report(on_node: Any) -> None:
    async def run(node: Any) -> None:
        heard: asyncio.Queue[DeviceReport] = asyncio.Queue()
        decode = msgspec.msgpack.Decoder(DeviceReport).decode
        node.bus.subscribe(subjects.device_report(node.name), lambda message: heard.put_nowait(decode(message.payload)))
        await node.start(inventory=_inventory(node, FakeGpu("GPU-0", utilisation=70)))
        async with asyncio.timeout(30):
            report = await heard.get()
        assert [(metrics.uuid, metrics.utilisation) for metrics in report.devices] == [("GPU-0", 0.7)]
        assert [device.uuid for device in node.reports[-1].devices] == [f"cpu-{node.name}", "GPU-0"]
        assert node.reports[-1].facts.driver == "595.91.07"

    on_node(run)


def test_the_report_of_a_worker_has_its_gpu_memory(on_node: Any) -> None:
    async def run(node: Any) -> None:
        gpu = FakeGpu("GPU-0")
        await node.deploy()
        await node.start(inventory=_inventory(node, gpu))
        worker = await node.assign(gpu="GPU-0")
        await node.line(f"hello from {worker}")
        (process,) = await node.until(lambda: node.reports[-1].processes)
        gpu.processes = {process.pid: 300, 1: 5000}
        await node.until(lambda: [each.gpu_bytes for each in node.reports[-1].processes] == [{"GPU-0": 300}])

    on_node(run)


def test_when_a_gpu_falls_off_the_bus_its_workers_are_ended_for_it(on_node: Any) -> None:
    async def run(node: Any) -> None:
        lost, well = FakeGpu("GPU-0"), FakeGpu("GPU-1")
        await node.deploy()
        await node.start(inventory=_inventory(node, lost, well))
        ended, spared = await node.assign(gpu="GPU-0"), await node.assign(gpu="GPU-1")
        await node.line(f"hello from {ended}")
        await node.line(f"hello from {spared}")
        lost.error = pynvml.NVML_ERROR_GPU_IS_LOST
        event = await node.event(ended, "exited")
        assert (event.worker, event.exit.device_fault) == (ended, "GPU-0: gpu is lost")
        report = await node.until(
            lambda: [each for each in node.reports if any(d.health is Health.FAILED for d in each.devices)]
        )
        assert [(d.uuid, d.health_reason) for d in report[0].devices if d.health is not Health.HEALTHY] == [
            ("GPU-0", "gpu is lost")
        ]
        await node.until(lambda: [process.worker for process in node.reports[-1].processes] == [spared])

    on_node(run)
