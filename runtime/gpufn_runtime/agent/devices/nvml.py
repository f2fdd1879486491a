"""GPUs that NVIDIA's driver reports: devices, metrics and error events.

1. `find` opens NVML once and keeps the handles: opening it can take seconds on a GPU without persistence mode.
2. A GPU in MIG mode is not offered; its instances are.
3. `sample` reads each device. Unsupported metrics stay None; a lost GPU is a HealthCondition.
4. If NVML itself is unavailable (the driver was reloaded), the next sample opens it again.

nvidia-ml-py is imported on demand, because a node without GPUs does not need it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
from typing import Any

from gpufn_core.domain.devices.device import Device, DeviceLink, DeviceType, Health, LinkKind
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_runtime.agent.devices.base import FoundDevices, HealthCondition, Sample
from gpufn_runtime.agent.devices.sampling import Sampler, query, read_memory, text

log = logging.getLogger(__name__)

_MAX_EVENTS = 100  # per sample
# Cores per multiprocessor, by compute capability. NVML reports only the number of cores.
_CORES = dict.fromkeys(("7.0", "7.2", "7.5", "8.0"), 64) | dict.fromkeys(
    ("8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"), 128
)


class NvmlInventory:
    """The node's CPU pool and GPUs. Without the library or the driver there are no GPUs, which is logged once."""

    def __init__(self, pool: Device, nvml: Any = None) -> None:
        self._pool = pool
        self._nvml = nvml
        self._handles: dict[str, Any] = {}  # of the offered devices, by uuid
        self._parents: dict[str, Any] = {}  # of all GPUs, by uuid
        self._gpus: dict[str, str] = {}  # uuids of GPUs, by uuid of the offered device: itself or an instance
        self._events: Any = None
        self._is_unavailable = False  # NVML does not open again; logged once
        self._without_events: set[str] = set()  # GPUs that do not support error events; logged once
        self._sampler: Sampler | None = None

    def find(self) -> FoundDevices:
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            return self._no_gpus("nvidia-ml-py is not installed")
        problem = "the NVIDIA driver does not answer"
        try:
            self._nvml.nvmlInit()
            problem = "the GPUs cannot be read"
            return self._find_devices()
        except self._nvml.NVMLError as error:
            return self._no_gpus(f"{problem}: {error}")

    def sample(self) -> Sample:
        if self._sampler is None:
            return Sample()
        nvml = self._nvml
        metrics: list[DeviceMetrics] = []
        conditions: dict[str, HealthCondition] = {}
        for uuid, handle in self._handles.items():
            try:
                metrics.append(self._sampler.read(uuid, handle, is_instance=self._gpus[uuid] != uuid))
            except nvml.NVMLError as error:
                is_lost = error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
                conditions[uuid] = HealthCondition(Health.FAILED if is_lost else Health.DEGRADED, str(error).lower())
        self._sampler.end_round()
        xids = self._new_xids()
        with_events = {uuid for uuid, _ in xids}
        for uuid, gpu in self._gpus.items():
            if gpu in with_events:
                self._sampler.reread(uuid)  # an error may have changed the recovery action
        if self._handles and len(conditions) == len(self._handles):
            self._reopen()
        return Sample(tuple(metrics), xids, conditions)

    # --- devices ------------------------------------------------------------------------------------------------------

    def _find_devices(self) -> FoundDevices:
        nvml = self._nvml
        devices: list[Device] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = self._read(handle)
                offered = self._instances(gpu, handle) if self._is_mig_enabled(handle) else [(gpu, handle)]
            except nvml.NVMLError as error:
                log.warning("GPU number %d is not offered: %s", index, error)
                continue
            self._parents[gpu.uuid] = handle
            for device, device_handle in offered:
                devices.append(device)
                self._handles[device.uuid] = device_handle
                self._gpus[device.uuid] = gpu.uuid
        self._sampler = Sampler(nvml, gpu_of=lambda uuid: self._parents[self._gpus[uuid]])
        self._register_events()
        cuda = query(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
        return FoundDevices(
            devices=(self._pool, *devices),
            links=self._links(),
            driver=text(query(nvml, nvml.nvmlSystemGetDriverVersion) or ""),
            cuda="" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        )

    def _read(self, handle: Any, parent: Device | None = None) -> Device:
        nvml = self._nvml
        memory = read_memory(nvml, handle)
        if parent is None:
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            capability = f"{major}.{minor}"
            cores = query(nvml, nvml.nvmlDeviceGetNumGpuCores, handle)
            multiprocessors = cores // _CORES[capability] if cores and capability in _CORES else 0
        else:
            capability = parent.compute_capability
            attributes = query(nvml, nvml.nvmlDeviceGetAttributes_v2, handle)
            multiprocessors = attributes.multiprocessorCount if attributes is not None else 0
        return Device(
            uuid=text(nvml.nvmlDeviceGetUUID(handle)),
            type=DeviceType.GPU,
            kind=text(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=int(memory.total) - int(getattr(memory, "reserved", 0)),
            compute_capability=capability,
            multiprocessors=multiprocessors,
            parent=parent.uuid if parent is not None else "",
        )

    def _is_mig_enabled(self, handle: Any) -> bool:
        mode = query(self._nvml, self._nvml.nvmlDeviceGetMigMode, handle)
        return mode is not None and bool(mode[0])

    def _instances(self, parent: Device, handle: Any) -> list[tuple[Device, Any]]:
        nvml = self._nvml
        instances: list[tuple[Device, Any]] = []
        for index in range(query(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = query(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if instance is not None:
                instances.append((self._read(instance, parent), instance))
        if not instances:
            log.warning(
                "GPU %s is not offered: MIG mode is enabled, but it has no instances. Create instances or disable MIG "
                "mode, then restart the agent",
                parent.uuid,
            )
        return instances

    def _links(self) -> tuple[DeviceLink, ...]:
        """Return the links between whole GPUs: a process can use only one MIG instance."""
        gpus = [(uuid, handle) for uuid, handle in self._handles.items() if uuid in self._parents]
        return tuple(
            DeviceLink(a, b, self._link(handle_a, handle_b))
            for (a, handle_a), (b, handle_b) in itertools.combinations(sorted(gpus, key=lambda pair: pair[0]), 2)
        )

    def _link(self, a: Any, b: Any) -> LinkKind:
        nvml = self._nvml
        if query(nvml, nvml.nvmlDeviceGetP2PStatus, a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return LinkKind.NVLINK
        kind_of_link = {
            nvml.NVML_TOPOLOGY_INTERNAL: LinkKind.SWITCH,
            nvml.NVML_TOPOLOGY_SINGLE: LinkKind.SWITCH,
            nvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.SWITCHES,
            nvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.BRIDGE,
            nvml.NVML_TOPOLOGY_NODE: LinkKind.HOST,
        }
        return kind_of_link.get(query(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, a, b), LinkKind.SOCKETS)

    # --- error events -------------------------------------------------------------------------------------------------

    def _register_events(self) -> None:
        nvml = self._nvml
        self._events = None
        events = query(nvml, nvml.nvmlEventSetCreate)
        for uuid, handle in self._parents.items():
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError as error:
                if uuid not in self._without_events:
                    log.info("GPU %s does not report error events: %s", uuid, error)
                self._without_events.add(uuid)
            else:
                self._events = events

    def _new_xids(self) -> tuple[tuple[str, int], ...]:
        nvml = self._nvml
        xids: list[tuple[str, int]] = []
        if self._events is None:
            return ()
        for _ in range(_MAX_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                xids.append((text(nvml.nvmlDeviceGetUUID(event.device)), int(event.eventData)))
            except nvml.NVMLError:  # no event is left; if NVML is unavailable, reading the devices reveals that
                break
        return tuple(xids)

    # --- recovery -----------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            if not self._is_unavailable:
                log.info("NVML cannot be reopened: %s", error)
            self._is_unavailable = True
            return
        self._is_unavailable = False
        for handles in (self._handles, self._parents):
            for uuid in handles:
                with contextlib.suppress(nvml.NVMLError):  # a lost GPU keeps its old handle, which reports the loss
                    handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        with contextlib.suppress(nvml.NVMLError):
            self._register_events()

    def _no_gpus(self, reason: str) -> FoundDevices:
        log.info("no GPUs: %s", reason)
        return FoundDevices((self._pool,))
