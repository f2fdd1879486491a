from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpufn_core.domain.devices.device import Device, DeviceType, Health, NodeFacts
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_platform.process.clock import SystemClock
from gpufn_runtime.agent.devices.base import FoundDevices, HealthCondition, Sample
from gpufn_runtime.agent.devices.failed_gpus import FailedGpus
from gpufn_runtime.agent.devices.health import COOLING_S, QUIET_S, HealthRecord
from gpufn_runtime.agent.devices.nvml import NvmlInventory
from gpufn_runtime.agent.devices.watch import DeviceWatch
from tests.runtime.agent.devices.fake_nvml import FakeGpu, FakeNvml

POOL = Device("cpu-a", DeviceType.CPU, "EPYC", 64 << 30, 16.0)


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109, 154])
def test_an_error_of_a_program_is_no_fault_of_the_gpu(xid: int) -> None:
    record = HealthRecord()
    record.on_xid(xid, 0.0)
    assert record.evaluate(0.0) == (Health.HEALTHY, "")
    assert record.xids == {str(xid): 1}


@pytest.mark.parametrize("xid", [48, 64, 79, 95, 119])
def test_final_errors_stay(xid: int) -> None:
    record = HealthRecord()
    record.on_xid(xid, 0.0)
    record.on_sample(DeviceMetrics(uuid="g"), None, 0.0)
    health, reason = record.evaluate(1e6)
    assert health is Health.FAILED
    assert reason.startswith(f"Xid {xid}: ")


@pytest.mark.parametrize("xid", [63, 94, 999])
def test_a_transient_error_blocks_new_workers_for_a_while(xid: int) -> None:
    record = HealthRecord()
    record.on_xid(xid, 100.0)
    assert [record.evaluate(at)[0] for at in (100.0, 100.0 + QUIET_S)] == [Health.DEGRADED, Health.HEALTHY]


@pytest.mark.parametrize(
    ("fields", "health", "reason"),
    [
        ({}, Health.HEALTHY, ""),
        ({"temperature_c": 96}, Health.HEALTHY, ""),  # no limit is known
        ({"temperature_c": 91, "temperature_limit_c": 92}, Health.HEALTHY, ""),
        ({"temperature_c": 92, "temperature_limit_c": 92}, Health.DEGRADED, "it is hot: 92 °C or more"),
        ({"clock_limits": ("power",)}, Health.HEALTHY, ""),
        (
            {"clock_limits": ("hardware_thermal",)},
            Health.DEGRADED,
            "the hardware slows it down because of heat",
        ),
        ({"rows_pending": True}, Health.HEALTHY, ""),  # "new workloads can be launched" (NVIDIA)
        ({"recovery_action": "none"}, Health.HEALTHY, ""),
        ({"recovery_action": "gpu_reset"}, Health.FAILED, "the driver requests a reset of it"),
        ({"recovery_action": "node_reboot"}, Health.FAILED, "the driver requests a reboot of the node"),
        ({"recovery_action": "drain_and_reset"}, Health.FAILED, "the driver requests to drain and reset it"),
        ({"recovery_action": "drain_p2p"}, Health.DEGRADED, "the driver requests to drain its peer-to-peer traffic"),
        ({"recovery_action": "unknown_9"}, Health.HEALTHY, ""),
        ({"rows_pending": True, "rows_failed": True}, Health.FAILED, "memory rows cannot be remapped"),
        ({"ecc_corrected": 10}, Health.HEALTHY, ""),
        ({"ecc_uncorrected": 10}, Health.HEALTHY, ""),  # counted before the first sample
    ],
)
def test_metrics_show_health(fields: dict[str, Any], health: Health, reason: str) -> None:
    record = HealthRecord()
    record.on_sample(DeviceMetrics(uuid="g", **fields), None, 0.0)
    assert record.evaluate(0.0) == (health, reason)


def test_a_gpu_at_its_temperature_limit_does_not_flap() -> None:
    """Regression: 84, 85, 84, 85 °C changed the health with each sample."""
    record = HealthRecord()
    states = []
    for now, temperature in enumerate((91, 92, 91, 92, 91)):
        record.on_sample(DeviceMetrics(uuid="g", temperature_c=temperature, temperature_limit_c=92), None, float(now))
        states.append(record.evaluate(float(now))[0])
    assert states == [Health.HEALTHY] + 4 * [Health.DEGRADED]
    assert record.evaluate(3.0 + COOLING_S)[0] is Health.HEALTHY


def test_new_memory_errors_block_new_workers_for_a_while_with_or_without_an_event() -> None:
    record = HealthRecord()
    for now, count in enumerate((10, 10, None, 11, 11)):
        record.on_sample(DeviceMetrics(uuid="g", ecc_uncorrected=count), None, float(now))
        assert record.evaluate(now)[0] is (Health.HEALTHY if now < 3 else Health.DEGRADED), now
    health, reason = record.evaluate(3.0)
    assert health is Health.DEGRADED
    assert "uncorrected" in reason
    assert record.evaluate(3.0 + QUIET_S) == (Health.HEALTHY, "")
    record.on_sample(DeviceMetrics(uuid="g", ecc_uncorrected=0), None, 1000.0)  # the driver was reloaded
    assert record.evaluate(1000.0) == (Health.HEALTHY, "")


def test_a_device_that_answers_again_is_well_again() -> None:
    record = HealthRecord()
    record.on_sample(None, HealthCondition(Health.DEGRADED, "unknown error"), 0.0)
    assert record.evaluate(0.0) == (Health.DEGRADED, "unknown error")
    record.on_sample(DeviceMetrics(uuid="g"), None, 0.0)
    assert record.evaluate(0.0) == (Health.HEALTHY, "")


class Clock(SystemClock):
    def __init__(self) -> None:
        self.now = 1.0

    def monotonic(self) -> float:
        return self.now


def _health(watch: DeviceWatch, now: float) -> list[tuple[Health, str]]:
    return [(device.health, device.health_reason) for device in watch.devices(now) if device.type is DeviceType.GPU]


async def _sampled(inventory: Any) -> list[DeviceMetrics]:
    told: asyncio.Queue[tuple[DeviceMetrics, ...]] = asyncio.Queue()
    watch = DeviceWatch(inventory, SystemClock(), period_s=0.001)
    watch.start(told.put_nowait)
    async with asyncio.timeout(30):
        metrics = await told.get()
    watch.stop()
    return list(metrics)


def test_devices_are_sampled_and_reported() -> None:
    told = asyncio.run(_sampled(NvmlInventory(POOL, FakeNvml(FakeGpu("GPU-0"), FakeGpu("GPU-1")))))
    assert [metrics.uuid for metrics in told] == ["GPU-0", "GPU-1"]


def test_an_urgent_request_gets_a_sample_that_begins_afterwards() -> None:
    async def run() -> tuple[int, int]:
        watch = DeviceWatch(NvmlInventory(POOL, FakeNvml(FakeGpu("GPU-0"))), SystemClock(), period_s=3600)
        came = asyncio.Event()
        watch.start(lambda metrics: None, came.set)
        begun = watch.samples_begun
        watch.sample_now()
        async with asyncio.timeout(30):
            await came.wait()
        watch.stop()
        return begun, watch.samples_received

    assert asyncio.run(run()) == (0, 1)


def test_the_memory_of_processes_is_summed_for_each_gpu() -> None:
    inventory = NvmlInventory(
        POOL, FakeNvml(FakeGpu("GPU-0", processes={7: 100, 8: 20, 9: 5000}), FakeGpu("GPU-1", processes={7: 110}))
    )
    watch = DeviceWatch(inventory, Clock())
    assert watch.gpu_bytes_of([7, 8], ["GPU-0", "GPU-1"]) == {"GPU-0": 120, "GPU-1": 110}
    assert watch.gpu_bytes_of([7], ["GPU-1"]) == {"GPU-1": 110}
    assert watch.gpu_bytes_of([1], ["GPU-0"]) == {}


def test_memory_of_processes_that_are_not_ours_is_reported_in_steps() -> None:
    mib = 1 << 20
    gpu = FakeGpu("GPU-0", processes={7: 9000 * mib, 8: 300 * mib, 9: 1}, clients={10: 100 * mib})
    gpu.displays = {8: 300 * mib, 11: 200 * mib}
    inventory = NvmlInventory(POOL, FakeNvml(gpu, FakeGpu("GPU-1")))

    def foreign(facts: NodeFacts) -> list[int]:
        async def run() -> list[int]:
            watch = DeviceWatch(inventory, Clock(), facts=lambda has_gpus: facts, period_s=3600)
            watch.start(lambda metrics: None, is_own=lambda pid: pid == 7)
            watch.apply(inventory.sample())
            watch.stop()
            return [device.foreign_bytes for device in watch.devices(1.0)[1:]]

        return asyncio.run(run())

    assert foreign(NodeFacts()) == [768 * mib, 0]
    assert foreign(NodeFacts(has_own_pids=True)) == [0, 0], "the driver's pids are of other processes here"


def test_the_utilisation_of_processes_is_summed_over_their_gpus() -> None:
    gpus = [FakeGpu(f"GPU-{n}", processes={7: 1, 8: 1}, clients={9: 1}, samples=[(7, 5, 50 * n)]) for n in (1, 2)]
    watch = DeviceWatch(NvmlInventory(POOL, FakeNvml(*gpus)), Clock())
    asked = [([7], ["GPU-1"]), ([7, 8], ["GPU-1", "GPU-2"]), ([8], ["GPU-1"]), ([9], ["GPU-1"]), ([1], ["GPU-1"])]
    assert [watch.busy_gpus_of(pids, uuids) for pids, uuids in asked] == [0.5, 1.5, None, None, None]


def test_an_event_of_a_gpu_applies_to_its_instances() -> None:
    instance = FakeGpu("MIG-1", "NVIDIA A100 MIG 1g.5gb", 5 << 30)
    nvml = FakeNvml(FakeGpu("GPU-0", instances=[instance], is_cut=True), FakeGpu("GPU-1"))
    inventory = NvmlInventory(POOL, nvml)
    clock = Clock()
    watch = DeviceWatch(inventory, clock)
    told: list[DeviceMetrics] = []
    watch._on_metrics = told.extend
    nvml.events.append(("GPU-0", 79))
    watch.apply(inventory.sample())
    (health, reason), other = _health(watch, 1.0)
    assert (health, reason.partition(":")[0], other) == (Health.FAILED, "Xid 79", (Health.HEALTHY, ""))
    assert [(metrics.uuid, metrics.xids) for metrics in told] == [("MIG-1", {"79": 1}), ("GPU-1", {})]


class _Silent:
    def find(self) -> FoundDevices:
        return FoundDevices((POOL, Device("GPU-0", DeviceType.GPU, "NVIDIA L4", 24 << 30)))

    def sample(self) -> Sample:
        return Sample()


def test_a_driver_that_does_not_answer_is_noticed() -> None:
    clock = Clock()
    watch = DeviceWatch(_Silent(), clock)
    watch.apply(Sample())
    assert _health(watch, 11.0) == [(Health.HEALTHY, "")]
    [(health, reason)] = _health(watch, 11.5)
    assert health is Health.DEGRADED
    assert reason.endswith(" for 10 s")


def test_faults_known_to_mps_count_as_well() -> None:
    watch = DeviceWatch(
        _Silent(), Clock(), other_trouble=lambda uuid: HealthCondition(Health.DEGRADED, f"{uuid}: no MPS")
    )
    assert _health(watch, 1.0) == [(Health.DEGRADED, "GPU-0: no MPS")]


def test_a_lost_gpu_is_failed(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu("GPU-0")
    inventory = NvmlInventory(POOL, FakeNvml(gpu))
    watch = DeviceWatch(inventory, Clock())
    gpu.error = pynvml.NVML_ERROR_GPU_IS_LOST
    watch.apply(inventory.sample())
    assert _health(watch, 1.0) == [(Health.FAILED, "gpu is lost")]


def _restarted(path: Path, gpu: FakeGpu, *, boot_id: str = "b", xid: int = 0) -> Health:
    """Run an agent's watch, in which `xid` may occur. Return the GPU's health in the end."""
    nvml = FakeNvml(gpu)
    inventory = NvmlInventory(POOL, nvml)
    watch = DeviceWatch(inventory, Clock(), failed_gpus=FailedGpus(path, boot_id=boot_id))
    if xid:
        nvml.events.append((gpu.uuid, xid))
    watch.apply(inventory.sample())
    return _health(watch, 1.0)[0][0]


@pytest.mark.parametrize(
    ("changes", "boot_id", "health"),
    [
        ({}, "b", Health.FAILED),
        ({}, "after-a-reboot", Health.HEALTHY),
        ({"lacks": set()}, "b", Health.HEALTHY),  # a driver that reports that no recovery is needed
        ({"lacks": set(), "recovery_action": 1}, "b", Health.FAILED),
    ],
)
def test_a_failed_gpu_stays_failed_over_a_restart_of_the_agent(
    tmp_path: Path, changes: dict[str, Any], boot_id: str, health: Health
) -> None:
    path = tmp_path / "failed.json"
    gpu = FakeGpu("GPU-0", lacks={"recovery_action"})
    assert _restarted(path, gpu) is Health.HEALTHY
    assert _restarted(path, gpu, xid=79) is Health.FAILED
    assert _restarted(path, gpu) is Health.FAILED
    for name, value in changes.items():
        setattr(gpu, name, value)
    assert _restarted(path, gpu, boot_id=boot_id) is health
    assert _restarted(path, gpu, boot_id=boot_id) is health


def test_a_failed_gpu_that_an_agent_cannot_read_stays_failed_for_the_next_one(tmp_path: Path) -> None:
    """Regression: an agent that found only the other GPU stored that nothing had failed."""
    path = tmp_path / "failed.json"
    gpu = FakeGpu("GPU-0", lacks={"recovery_action"})
    assert _restarted(path, gpu, xid=79) is Health.FAILED
    assert _restarted(path, FakeGpu("GPU-1", lacks={"recovery_action"}), xid=79) is Health.FAILED
    assert _restarted(path, gpu) is Health.FAILED
    assert FailedGpus(path, boot_id="b").load().keys() == {"GPU-0", "GPU-1"}


@pytest.mark.parametrize("content", [b"", b"{", b'{"boot_id": 1}'])
def test_a_damaged_file_of_failed_gpus_is_ignored(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "failed.json"
    path.write_bytes(content)
    assert _restarted(path, FakeGpu("GPU-0", lacks={"recovery_action"}), xid=79) is Health.FAILED
    assert _restarted(path, FakeGpu("GPU-0", lacks={"recovery_action"})) is Health.FAILED
    path.unlink()
    path.mkdir()  # it cannot be written
    assert _restarted(path, FakeGpu("GPU-0", lacks={"recovery_action"}), xid=79) is Health.FAILED


def test_the_recovery_action_is_read_at_the_start_and_after_an_error_for_instances_too() -> None:
    instance = FakeGpu("MIG-1", "NVIDIA A100 MIG 1g.5gb", 5 << 30)
    cut = FakeGpu("GPU-0", instances=[instance], is_cut=True, recovery_action=1)
    nvml = FakeNvml(cut, FakeGpu("GPU-1"))
    inventory = NvmlInventory(POOL, nvml)
    watch = DeviceWatch(inventory, Clock())
    assert [health for health, _ in _health(watch, 1.0)] == [Health.FAILED, Health.HEALTHY]
    nvml.gpus[1].recovery_action = 4
    nvml.events.append(("GPU-1", 154))
    watch.apply(inventory.sample())
    watch.apply(inventory.sample())
    assert [health for health, _ in _health(watch, 1.0)] == [Health.FAILED, Health.FAILED]
