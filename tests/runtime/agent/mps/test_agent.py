"""Agent whose workers share a GPU: their environment, and the effects of a GPU fault."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType, Health, Share
from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import RunnerReport, WorkerReport
from gpufn_core.spec.priority import Priority
from gpufn_runtime.agent.devices.base import HealthCondition
from gpufn_runtime.agent.mps.base import EndWorker, GpuShares, Joining
from gpufn_runtime.agent.mps.condition import Condition
from tests.runtime.agent.mps.machine import Machine

GPU = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 24 << 30, multiprocessors=58)
PART = DeviceShare("cpu", 0.1, 1 << 28, ("GPU-1",), Share.MPS, 6 << 30, 25)


def _pipe(node: Any) -> Path:
    (folder,) = node.home.mps.iterdir()
    return Path(folder) / "pipe"


def _says_ready(node: Any, *workers: str) -> None:
    reports = tuple(WorkerReport(worker, node.function, 1, WorkerState.READY, 1) for worker in workers)
    node.bus.publish(subjects.runner_report(node.name), encode(RunnerReport(node.name, "r", 0.0, reports)))


def test_a_worker_is_made_a_client_of_its_gpus_daemon(on_node: Any, machine: Machine) -> None:
    async def run(node: Any) -> None:
        await node.deploy("env")
        await node.start(gpus=(GPU,))
        await node.assign(share=PART)
        environment = json.loads((await node.line("ENV ")).removeprefix("ENV "))
        assert {name: environment[name] for name in environment if name.startswith("CUDA")} == {
            "CUDA_VISIBLE_DEVICES": "GPU-1",
            "CUDA_MPS_PIPE_DIRECTORY": str(_pipe(node)),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=6144M",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        }
        config = json.loads((await node.line("CONFIG ")).removeprefix("CONFIG "))
        assert config["mps"] == {"vram_bytes": 6 << 30, "sm_percent": 25, "multiprocessors": 58}
        await node.until(lambda: [p for p in node.reports[-1].processes if p.share == PART])
        assert len(machine.running()) == 2

    on_node(run)
    assert machine.rests()  # the agent has stopped


def test_after_a_fault_workers_are_evicted_ended_for_it_and_others_can_join(on_node: Any, machine: Machine) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start(gpus=(GPU,))
        worker = await node.assign(share=PART)
        await node.line(f"hello from {worker}")
        pid, pipe = await node.pid(worker), _pipe(node)
        machine.connect(pipe, pid)
        machine.fault(pipe)
        event = await node.event(worker, "exited")
        assert event.exit.device_fault == f"GPU-1: {Condition.FAULT.value}"
        assert machine.state(pipe)["terminated"] == [pid]
        ill = [device for report in node.reports for device in report.devices if device.health is Health.DEGRADED]
        assert {device.health_reason for device in ill} == {Condition.FAULT.value}
        await node.until(lambda: all(device.health is Health.HEALTHY for device in node.reports[-1].devices))
        other = await node.assign(share=PART)
        await node.line(f"hello from {other}")

    on_node(run)


class _Namespaces:
    """Another implementation of GpuShares, as for MPS v3. It records the calls."""

    has_child_processes = False
    pids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.end: EndWorker = lambda worker, reason: None
        self.asked: list[str] = []
        self.ill: HealthCondition | None = None

    @contextlib.asynccontextmanager
    async def joining(
        self, key: RevisionKey, share: DeviceShare, *, priority: Priority, contained: bool
    ) -> AsyncGenerator[Joining, None]:
        self.asked.append(f"joining {share.sm_percent} %")
        yield Joining({"CUDA_MPS_PIPE_DIRECTORY": "/run/namespaces/f"})

    def worker_joined(self, worker: str, key: RevisionKey, share: DeviceShare, pid: int) -> None:
        self.asked.append("worker_joined")

    def worker_ready(self, worker: str) -> None:
        self.asked.append("worker_ready")

    async def evict(self, worker: str, pids: Iterable[int]) -> None:
        self.asked.append("evict")

    def worker_ended(self, worker: str) -> None:
        self.asked.append("left")

    def trouble(self, gpu: str) -> HealthCondition | None:
        return self.ill

    async def take_over(self) -> None:
        self.asked.append("take_over")

    async def run(self, end: EndWorker) -> None:
        self.end = end
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.asked.append("stop")


def test_gpus_may_be_shared_in_another_way_than_by_a_daemon_for_each(on_node: Any) -> None:
    shares: GpuShares = _Namespaces()

    async def run(node: Any) -> None:
        assert isinstance(shares, _Namespaces)
        await node.deploy("env")
        await node.start(gpus=(GPU,), shares=shares)
        worker = await node.assign(share=PART)
        environment = json.loads((await node.line("ENV ")).removeprefix("ENV "))
        assert {name: environment[name] for name in environment if name.startswith("CUDA")} == {
            "CUDA_VISIBLE_DEVICES": "GPU-1",
            "CUDA_MPS_PIPE_DIRECTORY": "/run/namespaces/f",
        }
        _says_ready(node, worker)
        await node.until(lambda: "worker_ready" in shares.asked)
        shares.ill = HealthCondition(Health.DEGRADED, "its server has gone")
        await node.until(lambda: node.reports[-1].devices[-1].health_reason == "its server has gone")
        shares.end(worker, "a fault")
        assert (await node.event(worker, "exited")).exit.device_fault == "a fault"

    on_node(run)
    assert isinstance(shares, _Namespaces)
    assert list(dict.fromkeys(shares.asked)) == [
        "take_over", "joining 25 %", "worker_joined", "worker_ready", "evict", "left", "stop",
    ]  # fmt: skip


def test_a_worker_that_is_killed_is_evicted_first(on_node: Any, machine: Machine) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start(gpus=(GPU,))
        worker = await node.assign(share=PART)
        await node.line(f"hello from {worker}")
        pid, pipe = await node.pid(worker), _pipe(node)
        machine.connect(pipe, pid)
        node.kill(worker)
        event = await node.event(worker, "exited")
        assert (event.exit.signal, event.exit.device_fault) == (9, "")
        assert machine.state(pipe)["terminated"] == [pid]

    on_node(run)


def test_a_ready_worker_that_never_joined_is_ended(on_node: Any, machine: Machine) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start(gpus=(GPU,))
        joined, stranger = await node.assign(share=PART), await node.assign(share=PART)
        for worker in (joined, stranger):
            await node.line(f"hello from {worker}")
        machine.connect(_pipe(node), await node.pid(joined))
        _says_ready(node, joined, stranger)
        event = await node.event(stranger, "exited")
        assert "not a client" in event.exit.device_fault
        assert [process.worker for process in node.reports[-1].processes if process.worker == joined]

    on_node(run)


def test_workers_and_their_daemon_outlive_an_agent(on_node: Any, machine: Machine) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start(gpus=(GPU,))
        worker = await node.assign(share=PART)
        await node.line(f"hello from {worker}")
        pid, pipe = await node.pid(worker), _pipe(node)
        machine.connect(pipe, pid)
        daemon = machine.state(pipe)["daemon"]
        await node.vanish()
        node.reports.clear()
        await node.start(gpus=(GPU,))
        assert machine.state(pipe)["daemon"] == daemon
        machine.fault(pipe)
        event = await node.event(worker, "exited")
        assert event.exit.device_fault

    on_node(run)


def test_a_gpu_without_mps_is_reported_as_a_failed_start(on_node: Any, machine: Machine) -> None:
    machine.set(broken=True)

    async def run(node: Any) -> None:
        await node.deploy()
        await node.start(gpus=(GPU,))
        worker = await node.assign(share=PART)
        event = await node.event(worker, "start_failed")
        assert event.failure.error.code == "device_failed"
        assert "do not match" in event.failure.error.message

    on_node(run)
