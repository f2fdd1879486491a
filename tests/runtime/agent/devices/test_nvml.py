"""NVML inventory with a fake library, and a check that the real library has all names in use."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

import gpufn_runtime.agent.devices as package
from gpufn_core.domain.devices.device import Device, DeviceLink, DeviceType, Health, LinkKind
from gpufn_core.domain.devices.device_metrics import DeviceMetrics, GpuProcess
from gpufn_runtime.agent.devices.base import HealthCondition
from gpufn_runtime.agent.devices.nvml import NvmlInventory
from gpufn_runtime.agent.devices.sampling import CLOCK_LIMITS
from tests.runtime.agent.devices.fake_nvml import FakeGpu, FakeNvml

POOL = Device("cpu-a", DeviceType.CPU, "EPYC", 64 << 30, 16.0)
FOLDER = Path(package.__file__).parent


def _asked() -> Iterator[str]:
    """Return every `nvml.X` and `getattr(nvml, "X...")` in our code."""
    for file in ("nvml.py", "sampling.py"):
        for node in ast.walk(ast.parse((FOLDER / file).read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nvml":
                yield node.attr


def test_every_used_name_of_nvml_is_in_the_real_library() -> None:
    asked = set(_asked())
    assert len(asked) > 40
    assert [name for name in sorted(asked) if not hasattr(pynvml, name)] == []


def test_every_limit_of_the_clocks_is_one_of_the_real_library() -> None:
    assert [name for name in CLOCK_LIMITS if not hasattr(pynvml, f"nvmlClocksEventReason{name}")] == []


def test_the_fake_accepts_the_arguments_of_the_real_functions() -> None:
    differing = []
    for name in {name for name in _asked() if name.startswith("nvml") and callable(getattr(pynvml, name))}:
        real, fake = (inspect.signature(getattr(each, name)).parameters for each in (pynvml, FakeNvml()))
        if [p.default for p in real.values()] != [p.default for p in fake.values()]:
            differing.append(name)
    assert differing == []


def test_the_fields_in_use_exist_in_the_real_structs() -> None:
    def fields(struct: object) -> set[str]:
        return {field[0] for field in struct._fields_}  # type: ignore[attr-defined]

    assert {"total", "used", "reserved"} <= fields(pynvml.c_nvmlMemory_v2_t)
    assert {"gpu", "memory"} <= fields(pynvml.c_nvmlUtilization_t)
    assert {"device", "eventData"} <= fields(pynvml.c_nvmlEventData_t)
    assert {"pid", "usedGpuMemory"} <= fields(pynvml.c_nvmlProcessInfo_v2_t)
    assert {"nvmlReturn", "value"} <= fields(pynvml.c_nvmlFieldValue_t)
    assert {"uiVal"} <= fields(pynvml.c_nvmlValue_t)
    assert {"multiprocessorCount"} <= fields(pynvml.c_nvmlDeviceAttributes)


def test_a_gpu_is_offered_with_the_memory_that_the_driver_leaves() -> None:
    found = NvmlInventory(POOL, FakeNvml(FakeGpu("GPU-0"))).find()
    assert found.devices == (
        POOL,
        Device(
            "GPU-0", DeviceType.GPU, "NVIDIA A100-SXM4-80GB", 79 << 30, compute_capability="8.0", multiprocessors=108
        ),
    )
    assert (found.driver, found.cuda) == ("595.91.07", "13.1")


def test_an_older_driver_has_fewer_values() -> None:
    gpu = FakeGpu("GPU-0", lacks={"memory_v2", "nvmlDeviceGetNumGpuCores", "nvmlDeviceGetMigMode"})
    (_, device) = NvmlInventory(POOL, FakeNvml(gpu)).find().devices
    assert (device.memory_bytes, device.multiprocessors) == (80 << 30, 0)


def test_of_a_gpu_that_is_cut_the_instances_are_offered() -> None:
    small = FakeGpu("MIG-1", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10 << 30, reserved=0, multiprocessors=14)
    cut = FakeGpu("GPU-0", instances=[small], is_cut=True)
    empty = FakeGpu("GPU-1", is_cut=True)
    found = NvmlInventory(POOL, FakeNvml(cut, FakeGpu("GPU-2"), empty)).find()
    offered = [(device.uuid, device.parent, device.multiprocessors) for device in found.devices[1:]]
    assert offered == [("MIG-1", "GPU-0", 14), ("GPU-2", "", 108)]


def test_an_instance_has_no_energy_counter_of_its_own() -> None:
    gpu = FakeGpu("GPU-0", instances=[FakeGpu("MIG-1", multiprocessors=14)], is_cut=True)
    inventory = NvmlInventory(POOL, FakeNvml(gpu, FakeGpu("GPU-1")))
    inventory.find()
    energy = {each.uuid: each.energy_joules for each in inventory.sample().metrics}
    assert energy == {"MIG-1": None, "GPU-1": 5000.0}


def test_links_are_reported_for_each_pair() -> None:
    nvml = FakeNvml(FakeGpu("GPU-0"), FakeGpu("GPU-1"), FakeGpu("GPU-2"))
    nvml.links.add(frozenset(("GPU-0", "GPU-1")))
    nvml.ancestors[frozenset(("GPU-1", "GPU-2"))] = pynvml.NVML_TOPOLOGY_HOSTBRIDGE
    assert NvmlInventory(POOL, nvml).find().links == (
        DeviceLink("GPU-0", "GPU-1", LinkKind.NVLINK),
        DeviceLink("GPU-0", "GPU-2", LinkKind.SOCKETS),
        DeviceLink("GPU-1", "GPU-2", LinkKind.BRIDGE),
    )


def test_a_sample_has_the_values_of_the_device() -> None:
    gpu = FakeGpu("GPU-0", utilisation=80, reasons=pynvml.nvmlClocksEventReasonSwPowerCap | 1, rows=(1, 2, 0, 0))
    gpu.processes, gpu.clients, gpu.samples = {10: 1 << 30}, {11: 2 << 30}, [(10, 5, 30)]
    inventory = NvmlInventory(POOL, FakeNvml(gpu))
    inventory.find()
    (metrics,) = inventory.sample().metrics
    assert metrics == DeviceMetrics(
        uuid="GPU-0", utilisation=0.8, memory_busy=0.4, encoder=0.1, decoder=0.2, memory_total_bytes=80 << 30,
        memory_used_bytes=2 << 30, memory_reserved_bytes=1 << 30, temperature_c=40,
        temperature_limit_c=92, recovery_action="none", fan=0.3, power_w=71.5,
        power_limit_w=400.0, energy_joules=5000.0, sm_clock_mhz=1410, sm_clock_max_mhz=1410, memory_clock_mhz=1593,
        clock_limits=("idle", "power"), performance_state=0, ecc_corrected=3, ecc_uncorrected=0,
        rows_remapped_corrected=1, rows_remapped_uncorrected=2, rows_pending=False, rows_failed=False,
        pcie_generation=4, pcie_width=16, pcie_replays=0, pcie_sent_bytes_per_s=7000, pcie_received_bytes_per_s=9000,
            nvlink_sent_bytes=3072, nvlink_received_bytes=4096,
        processes=(GpuProcess(10, 1 << 30, 0.3), GpuProcess(11, 2 << 30)), mps_clients=1,
    )  # fmt: skip


def test_the_utilisation_of_a_process_without_a_sample_is_unknown() -> None:
    """Regression: it was 0, though the driver had reported the process by its pid in another namespace."""
    gpu = FakeGpu("GPU-0", processes={10: 1, 11: 1})
    inventory = NvmlInventory(POOL, FakeNvml(gpu))
    inventory.find()

    def used() -> list[float | None]:
        (metrics,) = inventory.sample().metrics
        return [process.utilisation for process in metrics.processes]

    assert used() == [None, None]
    gpu.samples = [(10, 7, 90), (10, 5, 30)]
    assert used() == [0.9, None]
    assert used() == [None, None]  # nothing new
    gpu.samples.append((11, 8, 100))
    assert used() == [None, 1.0]


def test_a_missing_value_of_a_device_is_none() -> None:
    silent = {name for name in _asked() if name.startswith("nvmlDeviceGet")} - {
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
    }
    inventory = NvmlInventory(POOL, FakeNvml(FakeGpu("GPU-0", lacks=silent | {"memory_v2"})))
    inventory.find()
    (metrics,) = inventory.sample().metrics
    assert metrics == DeviceMetrics(uuid="GPU-0", memory_total_bytes=80 << 30, memory_used_bytes=2 << 30)


@pytest.mark.parametrize(
    "error",
    [pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN), pynvml.NVMLError(pynvml.NVML_ERROR_OPERATING_SYSTEM),
     pynvml.NVMLLibraryMismatchError("the library is newer than the driver")],
)  # fmt: skip
def test_a_query_that_a_virtual_machine_or_an_old_driver_rejects_is_no_fault_of_the_device(
    error: Exception,
) -> None:
    asked = ("nvmlDeviceGetPcieThroughput", "nvmlDeviceGetNumGpuCores", "nvmlDeviceGetComputeRunningProcesses")
    gpu = FakeGpu("GPU-0", breaks=dict.fromkeys(asked, error))
    inventory = NvmlInventory(POOL, FakeNvml(gpu))
    assert [device.uuid for device in inventory.find().devices[1:]] == ["GPU-0"]
    sample = inventory.sample()
    assert sample.conditions == {}
    assert [(each.pcie_sent_bytes_per_s, each.temperature_c) for each in sample.metrics] == [(None, 40)]


def test_a_device_is_lost_though_its_memory_is_known() -> None:
    gpu = FakeGpu("GPU-0", breaks={"nvmlDeviceGetUtilizationRates": pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)})
    inventory = NvmlInventory(POOL, FakeNvml(gpu))
    inventory.find()
    assert inventory.sample().conditions == {"GPU-0": HealthCondition(Health.FAILED, "gpu is lost")}


@pytest.mark.parametrize(
    ("error", "health"),
    [("NVML_ERROR_GPU_IS_LOST", Health.FAILED), ("NVML_ERROR_RESET_REQUIRED", Health.FAILED),
     ("NVML_ERROR_UNKNOWN", Health.DEGRADED)],
)  # fmt: skip
def test_a_lost_device_has_failed_and_an_unreadable_one_is_degraded(error: str, health: Health) -> None:
    lost, well = FakeGpu("GPU-0"), FakeGpu("GPU-1")
    inventory = NvmlInventory(POOL, FakeNvml(lost, well))
    inventory.find()
    lost.error = getattr(pynvml, error)
    sample = inventory.sample()
    assert [metrics.uuid for metrics in sample.metrics] == ["GPU-1"]
    assert sample.conditions == {"GPU-0": HealthCondition(health, str(pynvml.NVMLError(lost.error)).lower())}


def test_lost_nvml_is_opened_again() -> None:
    nvml = FakeNvml(FakeGpu("GPU-0"))
    inventory = NvmlInventory(POOL, nvml)
    inventory.find()
    nvml.error = pynvml.NVML_ERROR_UNINITIALIZED
    nvml.registered.clear()
    assert set(inventory.sample().conditions) == {"GPU-0"}
    nvml.error = 0
    inventory.sample()
    nvml.events.append(("GPU-0", 79))
    sample = inventory.sample()
    assert (len(sample.metrics), sample.conditions, sample.xids) == (1, {}, (("GPU-0", 79),))


def test_a_gpu_missing_after_a_driver_reload_does_not_hide_others(caplog: pytest.LogCaptureFixture) -> None:
    gone, well = FakeGpu("GPU-0"), FakeGpu("GPU-1")
    nvml = FakeNvml(gone, well)
    inventory = NvmlInventory(POOL, nvml)
    inventory.find()
    nvml.error = pynvml.NVML_ERROR_UNINITIALIZED
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert set(inventory.sample().conditions) == {"GPU-0", "GPU-1"}
    assert [record.message.partition(": ")[2] for record in caplog.records] == ["Uninitialized"]
    nvml.error, gone.error = 0, pynvml.NVML_ERROR_GPU_IS_LOST
    nvml.gpus, nvml.registered = [FakeGpu("GPU-1")], set()  # a reloaded driver returns new handles
    well.error = pynvml.NVML_ERROR_INVALID_ARGUMENT
    inventory.sample()
    sample = inventory.sample()
    assert ([metrics.uuid for metrics in sample.metrics], set(sample.conditions)) == (["GPU-1"], {"GPU-0"})
    assert nvml.registered == {"GPU-1"}


def test_a_gpu_unreadable_at_the_start_does_not_hide_others(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml(FakeGpu("GPU-0", error=pynvml.NVML_ERROR_GPU_IS_LOST), FakeGpu("GPU-1"))
    assert [device.uuid for device in NvmlInventory(POOL, nvml).find().devices[1:]] == ["GPU-1"]
    assert re.search(r"GPU number 0 .*: GPU is lost", caplog.text)


def test_error_events_are_reported_once() -> None:
    nvml = FakeNvml(FakeGpu("GPU-0"), FakeGpu("GPU-1", lacks={"nvmlDeviceRegisterEvents"}))
    inventory = NvmlInventory(POOL, nvml)
    inventory.find()
    nvml.events += [("GPU-0", 13), ("GPU-0", 48)]
    assert inventory.sample().xids == (("GPU-0", 13), ("GPU-0", 48))
    assert inventory.sample().xids == ()


def test_missing_error_events_of_a_device_are_logged_once_for_all_openings_of_nvml(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = FakeGpu("GPU-0", lacks={"nvmlDeviceRegisterEvents"})
    inventory = NvmlInventory(POOL, FakeNvml(gpu))
    with caplog.at_level("INFO"):
        inventory.find()
        gpu.error = pynvml.NVML_ERROR_UNKNOWN
        for _ in range(3):
            inventory.sample()
    assert caplog.text.count("error events") == 1


def test_no_library_is_no_gpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level("INFO"):
        assert NvmlInventory(POOL).find().devices == (POOL,)
    [record] = caplog.records
    assert record.message.startswith("no GPUs: nvidia-ml-py ")


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH])
def test_no_driver_is_no_gpus(error: int, caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml(FakeGpu("GPU-0"))
    nvml.error = error
    inventory = NvmlInventory(POOL, nvml)
    with caplog.at_level("INFO"):
        assert inventory.find().devices == (POOL,)
    assert "no GPUs: the NVIDIA driver" in caplog.text
    assert inventory.sample().metrics == ()
