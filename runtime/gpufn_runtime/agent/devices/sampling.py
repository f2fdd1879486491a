"""One device's metrics, read by NVML. What changes seldom, or takes long to read, is read in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gpufn_core.domain.device_metrics import DeviceMetrics, GpuProcess

_SELDOM = 10  # reads of a device between two of its slow metrics
_MOST_PROCESSES = 64
CLOCK_LIMITS = {  # the ends of NVML's names
    "GpuIdle": "idle",
    "SwPowerCap": "power",
    "HwSlowdown": "hardware",
    "SyncBoost": "sync_boost",
    "SwThermalSlowdown": "thermal",
    "HwThermalSlowdown": "hardware_thermal",
    "HwPowerBrakeSlowdown": "power_brake",
    "ApplicationsClocksSetting": "setting",
    "DisplayClockSetting": "display",
}
HARDWARE_THERMAL = CLOCK_LIMITS["HwThermalSlowdown"]

T = TypeVar("T")


class Sampler:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._turn = 0
        self._slow: dict[str, DeviceMetrics] = {}
        self._told_until: dict[str, int] = {}  # what processes used was told up to then, by the driver's own clock
        self._limits = [(getattr(nvml, f"nvmlClocksEventReason{name}", 0), word) for name, word in CLOCK_LIMITS.items()]

    def turn(self) -> None:
        """All devices have been read once more."""
        self._turn += 1

    def read(self, uuid: str, handle: Any) -> DeviceMetrics:
        """Raises NVMLError when the device does not answer at all."""
        nvml = self._nvml
        slow = self._slow.get(uuid)
        # Each device in another second: PCIe traffic is measured for 40 ms.
        if slow is None or (self._turn + len(uuid) + ord(uuid[-1])) % _SELDOM == 0:
            slow = self._slow[uuid] = self._read_slow(uuid, handle)
        memory = said(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        if memory is None:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        used = said(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        own = said(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        clients = said(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle)
        busy = self._busy(uuid, handle)
        return msgspec.structs.replace(
            slow,
            utilisation=None if used is None else used.gpu / 100,
            memory_busy=None if used is None else used.memory / 100,
            memory_total_bytes=int(memory.total),
            memory_used_bytes=int(memory.used),
            memory_reserved_bytes=getattr(memory, "reserved", None),
            temperature_c=said(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=_divided(said(nvml, nvml.nvmlDeviceGetPowerUsage, handle), 1000),
            energy_j=_divided(said(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, handle), 1000),
            sm_clock_mhz=said(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            clock_limits=self._clock_limits(handle),
            processes=_processes(own, clients, busy),
            mps_clients=None if clients is None else len(clients),
        )

    def _read_slow(self, uuid: str, handle: Any) -> DeviceMetrics:
        nvml = self._nvml
        encoder = said(nvml, nvml.nvmlDeviceGetEncoderUtilization, handle)
        decoder = said(nvml, nvml.nvmlDeviceGetDecoderUtilization, handle)
        rows = said(nvml, nvml.nvmlDeviceGetRemappedRows, handle) or (None, None, None, None)
        sent, received = (
            said(nvml, nvml.nvmlDeviceGetPcieThroughput, handle, counter)
            for counter in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        )
        return DeviceMetrics(
            uuid=uuid,
            encoder=None if encoder is None else encoder[0] / 100,
            decoder=None if decoder is None else decoder[0] / 100,
            fan=_divided(said(nvml, nvml.nvmlDeviceGetFanSpeed, handle), 100),
            power_limit_w=_divided(said(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle), 1000),
            sm_clock_max_mhz=said(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=said(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            performance_state=said(nvml, nvml.nvmlDeviceGetPerformanceState, handle),
            ecc_corrected=self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            rows_remapped_corrected=rows[0],
            rows_remapped_uncorrected=rows[1],
            rows_pending=None if rows[2] is None else bool(rows[2]),
            rows_failed=None if rows[3] is None else bool(rows[3]),
            pcie_generation=said(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_width=said(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            pcie_replays=said(nvml, nvml.nvmlDeviceGetPcieReplayCounter, handle),
            pcie_sent_bytes_per_s=None if sent is None else sent * 1000,  # NVML's unit is KB/s
            pcie_received_bytes_per_s=None if received is None else received * 1000,
        )

    def _busy(self, uuid: str, handle: Any) -> dict[int, float] | None:
        """By pid, the share of the time in which the GPU ran its kernels, by the newest sample; who has none was idle.
        None until the driver has told any."""
        nvml, since = self._nvml, self._told_until.get(uuid, 0)
        # When there is nothing new the library raises, even success.
        samples = said(nvml, nvml.nvmlDeviceGetProcessUtilization, handle, since) or ()
        newest = sorted((each for each in samples if each.timeStamp > since), key=lambda each: each.timeStamp)
        if newest:
            self._told_until[uuid] = newest[-1].timeStamp
        return {each.pid: each.smUtil / 100 for each in newest} if uuid in self._told_until else None

    def _ecc(self, handle: Any, kind: int) -> int | None:
        nvml = self._nvml
        return said(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)

    def _clock_limits(self, handle: Any) -> tuple[str, ...]:
        nvml = self._nvml
        mask = said(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if mask is None:  # drivers before r535
            mask = said(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return tuple(word for bit, word in self._limits if mask & bit)


def said(nvml: Any, ask: Callable[..., T], *about: Any) -> T | None:
    """None where the device or the driver does not tell this. Raises NVMLError when there is nobody to tell anything.

    Virtual machines answer some questions with errors of any kind, which is no trouble of the device: whether it is
    there, its memory tells.
    """
    try:
        return ask(*about)
    except nvml.NVMLError as error:
        if error.value in (
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED,
        ):
            raise
    except nvml.NVMLLibraryMismatchError:  # the driver is older than the question
        pass
    return None


def text(value: str | bytes) -> str:
    """Older releases of the library answer bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _divided(value: int | None, by: int) -> float | None:
    return None if value is None else value / by


def _processes(
    own: list[Any] | None, clients: list[Any] | None, busy: dict[int, float] | None
) -> tuple[GpuProcess, ...]:
    """Clients of MPS are listed apart from those that have a context of their own, and what they use is their
    server's."""
    held = {each.pid: each.usedGpuMemory for each in [*(own or ()), *(clients or ())]}
    of_mps = {each.pid for each in clients or ()}
    return tuple(
        GpuProcess(pid, memory, None if busy is None or pid in of_mps else busy.get(pid, 0.0))
        for pid, memory in list(held.items())[:_MOST_PROCESSES]
    )
