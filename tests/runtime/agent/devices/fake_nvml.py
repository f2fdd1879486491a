"""Stateful fake of NVIDIA's management library, with the names, constants and errors of the real one. Its GPUs can be
partitioned, heated, broken and removed. `test_nvml.py` compares its names with nvidia-ml-py's."""

# ruff: noqa: N802

from __future__ import annotations

import dataclasses
from collections import deque
from types import SimpleNamespace
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")


@dataclasses.dataclass
class FakeGpu:
    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB"
    total: int = 80 << 30
    reserved: int = 1 << 30
    used: int = 2 << 30
    cores: int = 6912
    capability: tuple[int, int] = (8, 0)
    instances: list[FakeGpu] = dataclasses.field(default_factory=list)
    is_cut: bool = False
    utilisation: int = 0
    temperature: int = 40
    reasons: int = 0
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    recovery_action: int = 0
    processes: dict[int, int] = dataclasses.field(default_factory=dict)
    displays: dict[int, int] = dataclasses.field(default_factory=dict)
    clients: dict[int, int] = dataclasses.field(default_factory=dict)
    samples: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # pid, timestamp, percent
    multiprocessors: int = 0  # of an instance
    power_limit: int = 400_000
    power_range: tuple[int, int] = (100_000, 400_000)
    error: int = 0  # every query raises it
    lacks: set[str] = dataclasses.field(default_factory=set)  # functions that it does not support
    breaks: dict[str, Exception] = dataclasses.field(default_factory=dict)  # what functions raise


class FakeNvml:
    """`links` are the uuid pairs joined by NVLink, `ancestors` the common ancestors of others. `error` fails NVML."""

    NVMLError = pynvml.NVMLError
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.error = 0
        self.links: set[frozenset[str]] = set()
        self.ancestors: dict[frozenset[str], int] = {}
        self.events: deque[tuple[str, int]] = deque()
        self.registered: set[str] = set()
        self.opened = 0
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        """Return a real constant. A function that is missing here is missing in the real library too, or
        the test that needs it fails."""
        value = getattr(pynvml, name)
        if callable(value):
            raise AttributeError(f"the fake has no {name}")
        return value

    # --- the library ---

    def nvmlInit(self) -> None:
        self._answer()
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "595.91.07"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13010

    def nvmlDeviceGetCount(self) -> int:
        self._answer()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        self._answer()
        for gpu in self.gpus:
            for each in (gpu, *gpu.instances):
                if each.uuid == uuid:
                    return each
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    # --- properties of a device ---

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return self._of(gpu, "nvmlDeviceGetUUID", gpu.uuid)

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return self._of(gpu, "nvmlDeviceGetName", gpu.name)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return gpu.capability

    def nvmlDeviceGetNumGpuCores(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetNumGpuCores", gpu.cores)

    def nvmlDeviceGetAttributes_v2(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(multiprocessorCount=gpu.multiprocessors)

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return self._of(gpu, "nvmlDeviceGetMigMode", [int(gpu.is_cut), int(gpu.is_cut)])

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return gpu.instances[index]

    def nvmlDeviceGetP2PStatus(self, a: FakeGpu, b: FakeGpu, index: int) -> int:
        assert index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        joined = frozenset((a.uuid, b.uuid)) in self.links
        return int(pynvml.NVML_P2P_STATUS_OK if joined else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)

    def nvmlDeviceGetTopologyCommonAncestor(self, a: FakeGpu, b: FakeGpu) -> int:
        return int(self.ancestors.get(frozenset((a.uuid, b.uuid)), pynvml.NVML_TOPOLOGY_SYSTEM))

    # --- state of a device ---

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> Any:
        fields = {"total": gpu.total, "used": gpu.used, "free": gpu.total - gpu.used}
        if version is None:
            return self._of(gpu, "", SimpleNamespace(**fields))
        return self._of(gpu, "memory_v2", SimpleNamespace(**fields, reserved=gpu.reserved))

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        rates = SimpleNamespace(gpu=gpu.utilisation, memory=gpu.utilisation // 2)
        return self._of(gpu, "nvmlDeviceGetUtilizationRates", rates)

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        return self._of(gpu, "nvmlDeviceGetTemperature", gpu.temperature)

    def nvmlDeviceGetTemperatureThreshold(self, gpu: FakeGpu, threshold: int) -> int:
        assert threshold == pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return self._of(gpu, "nvmlDeviceGetTemperatureThreshold", 92)

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fieldIds: list[Any]) -> Any:  # noqa: N803
        if isinstance(fieldIds[0], tuple):
            return self._nvlink_bytes(gpu, *fieldIds[0])
        assert fieldIds == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        assert not gpu.uuid.startswith("MIG"), "instances do not report it"
        value = SimpleNamespace(uiVal=gpu.recovery_action)
        code = pynvml.NVML_ERROR_NOT_SUPPORTED if "recovery_action" in gpu.lacks else pynvml.NVML_SUCCESS
        return self._of(gpu, "nvmlDeviceGetFieldValues", [SimpleNamespace(nvmlReturn=code, value=value)])

    def _nvlink_bytes(self, gpu: FakeGpu, field: int, scope: int) -> Any:
        """Return the KiB that went over all links."""
        assert scope == 0xFFFFFFFF
        kib = {pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: 3, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: 4}[field]
        code = pynvml.NVML_ERROR_NOT_SUPPORTED if "nvlink" in gpu.lacks else pynvml.NVML_SUCCESS
        value = SimpleNamespace(ullVal=kib)
        return self._of(gpu, "nvmlDeviceGetFieldValues", [SimpleNamespace(nvmlReturn=code, value=value)])

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetPowerUsage", 71_500)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetEnforcedPowerLimit", 400_000)

    def nvmlDeviceGetPowerManagementLimit(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetPowerManagementLimit", gpu.power_limit)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, gpu: FakeGpu) -> list[int]:
        return self._of(gpu, "nvmlDeviceGetPowerManagementLimitConstraints", list(gpu.power_range))

    def nvmlDeviceSetPowerManagementLimit(self, gpu: FakeGpu, limit: int) -> None:
        self._of(gpu, "nvmlDeviceSetPowerManagementLimit", None)
        gpu.power_limit = limit

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetTotalEnergyConsumption", 5_000_000)

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return self._of(gpu, "nvmlDeviceGetClockInfo", 1410 if kind == pynvml.NVML_CLOCK_SM else 1593)

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        return self._of(gpu, "nvmlDeviceGetMaxClockInfo", 1410)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetCurrentClocksEventReasons", gpu.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetCurrentClocksThrottleReasons", gpu.reasons)

    def nvmlDeviceGetPerformanceState(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetPerformanceState", 0)

    def nvmlDeviceGetFanSpeed(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetFanSpeed", 30)

    def nvmlDeviceGetEncoderUtilization(self, gpu: FakeGpu) -> list[int]:
        return self._of(gpu, "nvmlDeviceGetEncoderUtilization", [10, 1000])

    def nvmlDeviceGetDecoderUtilization(self, gpu: FakeGpu) -> list[int]:
        return self._of(gpu, "nvmlDeviceGetDecoderUtilization", [20, 1000])

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:
        return self._of(gpu, "nvmlDeviceGetTotalEccErrors", 3 if kind == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED else 0)

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:
        return self._of(gpu, "nvmlDeviceGetRemappedRows", gpu.rows)

    def nvmlDeviceGetPcieThroughput(self, gpu: FakeGpu, counter: int) -> int:
        return self._of(gpu, "nvmlDeviceGetPcieThroughput", 7 if counter == pynvml.NVML_PCIE_UTIL_TX_BYTES else 9)

    def nvmlDeviceGetPcieReplayCounter(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetPcieReplayCounter", 0)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetCurrPcieLinkGeneration", 4)

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: FakeGpu) -> int:
        return self._of(gpu, "nvmlDeviceGetCurrPcieLinkWidth", 16)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return self._of(gpu, "nvmlDeviceGetComputeRunningProcesses", _listed(gpu.processes))

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return self._of(gpu, "nvmlDeviceGetGraphicsRunningProcesses", _listed(gpu.displays))

    def nvmlDeviceGetMPSComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return self._of(gpu, "nvmlDeviceGetMPSComputeRunningProcesses", _listed(gpu.clients))

    def nvmlDeviceGetProcessUtilization(self, gpu: FakeGpu, timeStamp: int) -> list[Any]:  # noqa: N803
        told = [each for each in gpu.samples if each[1] > timeStamp]
        samples = [SimpleNamespace(pid=pid, timeStamp=at, smUtil=percent) for pid, at, percent in told]
        found = self._of(gpu, "nvmlDeviceGetProcessUtilization", samples)
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_SUCCESS)  # like the real library
        return found

    # --- error events ---

    def nvmlEventSetCreate(self) -> object:
        self._answer()
        return self.events

    def nvmlDeviceRegisterEvents(self, gpu: FakeGpu, types: int, events: object) -> None:
        assert types == pynvml.nvmlEventTypeXidCriticalError
        self._of(gpu, "nvmlDeviceRegisterEvents", None)
        self.registered.add(gpu.uuid)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        self._answer()
        assert timeout_ms == 0
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        uuid, xid = self.events.popleft()
        gpu = next(gpu for gpu in self.gpus if gpu.uuid == uuid)
        return SimpleNamespace(device=gpu, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid)

    # --- replies ---

    def _answer(self) -> None:
        self.calls += 1
        if self.error:
            raise pynvml.NVMLError(self.error)

    def _of(self, gpu: FakeGpu, function: str, value: T) -> T:
        self._answer()
        if gpu.error:
            raise pynvml.NVMLError(gpu.error)
        if function in gpu.breaks:
            raise gpu.breaks[function]
        if function in gpu.lacks:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


def _listed(processes: dict[int, int]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in processes.items()]
