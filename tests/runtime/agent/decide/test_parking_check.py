"""Workers that report that they are parked: verification, end, and the agent's reports."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.worker import Desired, ParkedMemory, WorkerState
from gpufn_core.protocol.reports import ProcessReport
from gpufn_runtime.agent.decide.parking_check import MAX_REMAINING_BYTES, Claim, verify
from gpufn_runtime.agent.devices.nvml import NvmlInventory
from tests.runtime.agent.devices.fake_nvml import FakeGpu, FakeNvml

SAYS = ParkedMemory(host_bytes=5 << 30, device_bytes=10 << 20)


@pytest.mark.parametrize(
    ("seen", "held", "expected"),
    [
        (7, 0, None),  # this sample may have begun before it parked
        (8, 400 << 20, ParkedMemory(5 << 30, 400 << 20)),
        (8, 0, SAYS),
        (8, None, SAYS),
        (8, MAX_REMAINING_BYTES + (1 << 20), "it reports that it is parked, but holds 1.001 GiB of its GPU"),
    ],
)
def test_a_value_of_the_driver_counts_once_it_is_new_enough(seen: int, held: int | None, expected: object) -> None:
    assert verify(Claim(SAYS, at_sample=7), seen, held) == expected


def _process(node: Any, worker: str) -> ProcessReport | None:
    return next((each for each in node.reports[-1].processes if each.worker == worker), None) if node.reports else None


def _parked(node: Any, worker: str) -> ParkedMemory | None:
    process = _process(node, worker)
    return process.parked if process is not None else None


def _on_a_gpu(node: Any) -> tuple[FakeGpu, NvmlInventory]:
    gpu = FakeGpu("GPU-0")
    return gpu, NvmlInventory(Device(f"cpu-{node.name}", DeviceType.CPU, "CPU", 4 << 30, 2.0), FakeNvml(gpu))


def test_gpu_memory_of_a_parked_worker_is_reported_until_it_resumes(on_node: Any) -> None:
    async def run(node: Any) -> None:
        gpu, inventory = _on_a_gpu(node)
        await node.deploy()
        await node.start(inventory=inventory)
        worker = await node.assign(gpu="GPU-0")
        gpu.processes = {await node.pid(worker): 300 << 20}
        node.runner_says({worker: WorkerState.PARKED}, SAYS)
        assert await node.until(lambda: _parked(node, worker)) == ParkedMemory(5 << 30, 300 << 20)
        node.runner_says({worker: WorkerState.RESUMING})
        await node.until(lambda: _process(node, worker) and _parked(node, worker) is None)

    on_node(run)


def test_a_parked_worker_that_still_holds_gpu_memory_is_ended(on_node: Any) -> None:
    async def run(node: Any) -> None:
        gpu, inventory = _on_a_gpu(node)
        await node.deploy()
        await node.start(inventory=inventory)
        worker = await node.assign(gpu="GPU-0")
        gpu.processes = {await node.pid(worker): 30 << 30}
        node.runner_says({worker: WorkerState.PARKED}, SAYS)
        await node.event(worker, "exited")
        assert _parked(node, worker) is None

    on_node(run)


def test_a_worker_without_a_gpu_is_believed(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start(park_bytes=3 << 30)
        worker = await node.assign()
        await node.event(worker, "started")
        node.runner_says({worker: WorkerState.PARKED}, SAYS)
        assert await node.until(lambda: _parked(node, worker)) == SAYS
        assert node.reports[-1].park_bytes == 3 << 30

    on_node(run)


def test_a_parked_worker_outlives_its_agent_and_is_proven_to_the_next(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start()
        worker = await node.assign()
        pid = await node.pid(worker)
        await node.vanish()
        await node.assign(worker, desired=Desired.PARK)
        node.reports.clear()
        await node.start()
        await node.until(lambda: _process(node, worker))
        node.runner_says({worker: WorkerState.PARKED}, SAYS)
        assert await node.until(lambda: _parked(node, worker)) == SAYS
        process = _process(node, worker)
        assert process is not None
        assert process.pid == pid

    on_node(run)
