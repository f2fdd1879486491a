"""Metrics of GPUs, read through NVML. Metrics that change slowly or are slow to read are read less often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gpufn_core.domain.devices.device_metrics import DeviceMetrics, GpuProcess

_SLOW_INTERVAL = 10  # rounds between two reads of a device's slow metrics
_MAX_PROCESSES = 64
_ALL_LINKS = 0xFFFFFFFF  # the scope of a field of NVLinks: UINT_MAX is the sum of all
CLOCK_LIMITS = {  # suffixes of NVML's nvmlClocksEventReason constants
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
_RECOVERY_ACTIONS = (
    "NONE", "GPU_RESET", "NODE_REBOOT", "DRAIN_P2P", "DRAIN_AND_RESET", "RECOVER_IMEX_DOMAIN", "BUS_RESET",
    "SYSTEM_REBOOT",
)  # fmt: skip
HARDWARE_THERMAL = CLOCK_LIMITS["HwThermalSlowdown"]

T = TypeVar("T")


class Sampler:
    """Reads devices. `gpu_of` returns the handle of the GPU that a handle is an instance of, or the handle itself."""

    def __init__(self, nvml: Any, gpu_of: Callable[[str], Any]) -> None:
        self._nvml = nvml
        self._gpu_of = gpu_of
        self._round = 0
        self._slow: dict[str, DeviceMetrics] = {}
        self._last_sample_time: dict[str, int] = {}  # by uuid: driver time of the newest process utilization sample
        self._limits = [(getattr(nvml, f"nvmlClocksEventReason{name}", 0), word) for name, word in CLOCK_LIMITS.items()]

    def reread(self, uuid: str) -> None:
        """Read the slow metrics of a device in the next round."""
        self._slow.pop(uuid, None)

    def end_round(self) -> None:
        """Finish a round in which all devices were read."""
        self._round += 1

    def read(self, uuid: str, handle: Any, *, is_instance: bool = False) -> DeviceMetrics:
        """Read a device's metrics. `is_instance`: it is a MIG instance. Raises NVMLError if it does not answer."""
        nvml = self._nvml
        slow = self._slow.get(uuid)
        # Spread the devices over the rounds: measuring PCIe traffic takes 40 ms.
        if slow is None or (self._round + len(uuid) + ord(uuid[-1])) % _SLOW_INTERVAL == 0:
            slow = self._slow[uuid] = self._read_slow(uuid, handle)
        memory = read_memory(nvml, handle)
        utilization = query(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        own_contexts = query(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        displays = query(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle)
        clients = query(nvml, nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle)
        busy = self._busy(uuid, handle)
        # An instance has no counter of its own, and the GPU's would count for each instance.
        energy = None if is_instance else query(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return msgspec.structs.replace(
            slow,
            utilisation=None if utilization is None else utilization.gpu / 100,
            memory_busy=None if utilization is None else utilization.memory / 100,
            memory_total_bytes=int(memory.total),
            memory_used_bytes=int(memory.used),
            memory_reserved_bytes=getattr(memory, "reserved", None),
            temperature_c=query(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=_divided(query(nvml, nvml.nvmlDeviceGetPowerUsage, handle), 1000),
            energy_joules=_divided(energy, 1000),
            sm_clock_mhz=query(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            clock_limits=self._clock_limits(handle),
            processes=_processes([*(displays or ()), *(own_contexts or ())], clients, busy),
            mps_clients=None if clients is None else len(clients),
        )

    def _read_slow(self, uuid: str, handle: Any) -> DeviceMetrics:
        nvml = self._nvml
        encoder = query(nvml, nvml.nvmlDeviceGetEncoderUtilization, handle)
        decoder = query(nvml, nvml.nvmlDeviceGetDecoderUtilization, handle)
        rows = query(nvml, nvml.nvmlDeviceGetRemappedRows, handle) or (None, None, None, None)
        sent, received = (
            query(nvml, nvml.nvmlDeviceGetPcieThroughput, handle, counter)
            for counter in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        )
        return DeviceMetrics(
            uuid=uuid,
            encoder=None if encoder is None else encoder[0] / 100,
            decoder=None if decoder is None else decoder[0] / 100,
            fan=_divided(query(nvml, nvml.nvmlDeviceGetFanSpeed, handle), 100),
            temperature_limit_c=query(
                nvml, nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            )
            or None,
            recovery_action=self._recovery_action(self._gpu_of(uuid)),
            power_limit_w=_divided(query(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle), 1000),
            sm_clock_max_mhz=query(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=query(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            performance_state=query(nvml, nvml.nvmlDeviceGetPerformanceState, handle),
            ecc_corrected=self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            rows_remapped_corrected=rows[0],
            rows_remapped_uncorrected=rows[1],
            rows_pending=None if rows[2] is None else bool(rows[2]),
            rows_failed=None if rows[3] is None else bool(rows[3]),
            pcie_generation=query(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_width=query(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            pcie_replays=query(nvml, nvml.nvmlDeviceGetPcieReplayCounter, handle),
            pcie_sent_bytes_per_s=None if sent is None else sent * 1000,  # NVML's unit is KB/s
            pcie_received_bytes_per_s=None if received is None else received * 1000,
            nvlink_sent_bytes=self._nvlink_bytes(handle, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"),
            nvlink_received_bytes=self._nvlink_bytes(handle, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"),
        )

    def _nvlink_bytes(self, handle: Any, name: str) -> int | None:
        """Return the bytes transferred over all NVLinks of a GPU. A GPU without links does not report any."""
        nvml = self._nvml
        field = getattr(nvml, name, None)
        if field is None:
            return None
        values = query(nvml, nvml.nvmlDeviceGetFieldValues, handle, [(field, _ALL_LINKS)])
        if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        return int(values[0].value.ullVal) * 1024

    def _busy(self, uuid: str, handle: Any) -> dict[int, float] | None:
        """Return by pid the share of time in which the GPU ran the process's kernels. Return None until the driver has
        reported a sample."""
        nvml, since = self._nvml, self._last_sample_time.get(uuid, 0)
        # Without new samples the library raises an error, even for the code "success".
        samples = query(nvml, nvml.nvmlDeviceGetProcessUtilization, handle, since) or ()
        newest = sorted((sample for sample in samples if sample.timeStamp > since), key=lambda sample: sample.timeStamp)
        if newest:
            self._last_sample_time[uuid] = newest[-1].timeStamp
        return {sample.pid: sample.smUtil / 100 for sample in newest} if uuid in self._last_sample_time else None

    def _recovery_action(self, gpu: Any) -> str | None:
        """Return the recovery that the driver requests for a GPU, and so for its instances."""
        nvml = self._nvml
        field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        values = query(nvml, nvml.nvmlDeviceGetFieldValues, gpu, [field]) if field is not None else None
        if not values or values[0].nvmlReturn != nvml.NVML_SUCCESS:
            return None
        number = values[0].value.uiVal
        known = {getattr(nvml, f"NVML_GPU_RECOVERY_ACTION_{name}", None): name.lower() for name in _RECOVERY_ACTIONS}
        return known.get(number, f"unknown_{number}")

    def _ecc(self, handle: Any, kind: int) -> int | None:
        nvml = self._nvml
        return query(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)

    def _clock_limits(self, handle: Any) -> tuple[str, ...]:
        nvml = self._nvml
        mask = query(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if mask is None:  # drivers before r535
            mask = query(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return tuple(word for bit, word in self._limits if mask & bit)


def query(nvml: Any, function: Callable[..., T], *args: Any) -> T | None:
    """Return None if the device or driver does not support a query. Raises NVMLError if NVML or the GPU is unavailable.

    Virtual machines return all kinds of errors for some queries, although the device is fine. The memory query decides
    whether the device is there.
    """
    try:
        return function(*args)
    except nvml.NVMLError as error:
        if error.value in (
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED,
        ):
            raise
    except nvml.NVMLLibraryMismatchError:  # the driver is older than this query
        pass
    return None


def read_memory(nvml: Any, handle: Any) -> Any:
    """Read the memory sizes, with the driver's reserved memory if it is reported."""
    memory = query(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    return nvml.nvmlDeviceGetMemoryInfo(handle) if memory is None else memory


def text(value: str | bytes) -> str:
    """Decode bytes, which older releases of the library return."""
    return value.decode() if isinstance(value, bytes) else value


def _divided(value: int | None, by: int) -> float | None:
    return None if value is None else value / by


def _processes(
    own_contexts: list[Any], clients: list[Any] | None, busy: dict[int, float] | None
) -> tuple[GpuProcess, ...]:
    """Merge the process lists. MPS clients are listed separately from processes with their own context, and their
    utilization is attributed to the MPS server. A process without a sample of its utilization was idle or is unknown:
    in a container, the driver may report its pid in another pid namespace than the list."""
    memory_by_pid = {process.pid: process.usedGpuMemory for process in [*own_contexts, *(clients or ())]}
    mps_pids = {process.pid for process in clients or ()}
    return tuple(
        GpuProcess(pid, memory, None if busy is None or pid in mps_pids else busy.get(pid))
        for pid, memory in list(memory_by_pid.items())[:_MAX_PROCESSES]
    )
