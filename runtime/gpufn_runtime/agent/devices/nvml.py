"""GPUs as NVIDIA's driver tells: what there is, how it is, and its error events.

1. `find` opens NVML, once, and keeps the handles: opening it takes up to seconds on a GPU without persistence
2. a GPU that is cut into instances (MIG) is not offered, its instances are
3. `sample` reads each device; what one does not tell stays None, what is lost is a Trouble
4. when NVML itself has gone (the driver was loaded anew), it is opened again by the next sample

nvidia-ml-py is imported when asked, for a node without GPUs has no need of it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
from typing import Any

from gpufn_core.domain.device import Device, DeviceLink, DeviceType, Health, LinkKind
from gpufn_core.domain.device_metrics import DeviceMetrics
from gpufn_runtime.agent.devices.base import Found, Sample, Trouble
from gpufn_runtime.agent.devices.sampling import Sampler, said, text

log = logging.getLogger(__name__)

_MOST_EVENTS = 100  # of one sample
# Cores of a multiprocessor, by compute capability; NVML tells the cores only.
_CORES = dict.fromkeys(("7.0", "7.2", "7.5", "8.0"), 64) | dict.fromkeys(
    ("8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"), 128
)


class NvmlInventory:
    """The node's GPUs, beside its CPU pool. No library or no driver means no GPUs; this is said once."""

    def __init__(self, pool: Device, nvml: Any = None) -> None:
        self._pool = pool
        self._nvml = nvml
        self._handles: dict[str, Any] = {}  # of devices that are offered, by uuid
        self._parents: dict[str, Any] = {}  # of all GPUs
        self._events: Any = None
        self._is_away = False  # NVML itself; said once
        self._silent: set[str] = set()  # GPUs that tell of no errors; said once
        self._sampler: Sampler | None = None

    def find(self) -> Found:
        try:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
        except ImportError:
            return self._none("nvidia-ml-py is not installed")
        nvml = self._nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return self._none(f"the NVIDIA driver does not answer: {error}")
        try:
            return self._found()
        except nvml.NVMLError as error:
            return self._none(f"the GPUs cannot be read: {error}")

    def sample(self) -> Sample:
        if self._sampler is None:
            return Sample()
        nvml = self._nvml
        metrics: list[DeviceMetrics] = []
        troubles: dict[str, Trouble] = {}
        for uuid, handle in self._handles.items():
            try:
                metrics.append(self._sampler.read(uuid, handle))
            except nvml.NVMLError as error:
                is_lost = error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
                troubles[uuid] = Trouble(Health.FAILED if is_lost else Health.DEGRADED, str(error).lower())
        self._sampler.turn()
        xids = self._new_xids()
        if self._handles and len(troubles) == len(self._handles):
            self._open_again()
        return Sample(tuple(metrics), xids, troubles)

    # --- what there is ------------------------------------------------------------------------------------------------

    def _found(self) -> Found:
        nvml = self._nvml
        devices: list[Device] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                whole = self._read(handle)
                offered = self._instances(whole, handle) if self._is_cut(handle) else [(whole, handle)]
            except nvml.NVMLError as error:
                log.warning("GPU number %d is not offered: %s", index, error)
                continue
            self._parents[whole.uuid] = handle
            for device, own in offered:
                devices.append(device)
                self._handles[device.uuid] = own
        self._sampler = Sampler(nvml)
        self._listen()
        cuda = said(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
        return Found(
            devices=(self._pool, *devices),
            links=self._links(),
            driver=text(said(nvml, nvml.nvmlSystemGetDriverVersion) or ""),
            cuda="" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        )

    def _read(self, handle: Any, parent: Device | None = None) -> Device:
        nvml = self._nvml
        memory = self._memory(handle)
        if parent is None:
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            capability = f"{major}.{minor}"
            cores = said(nvml, nvml.nvmlDeviceGetNumGpuCores, handle)
            multiprocessors = cores // _CORES[capability] if cores and capability in _CORES else 0
        else:
            capability = parent.compute_capability
            attributes = said(nvml, nvml.nvmlDeviceGetAttributes_v2, handle)
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

    def _memory(self, handle: Any) -> Any:
        """With what the driver keeps for itself, where it says so."""
        nvml = self._nvml
        memory = said(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        return nvml.nvmlDeviceGetMemoryInfo(handle) if memory is None else memory

    def _is_cut(self, handle: Any) -> bool:
        mode = said(self._nvml, self._nvml.nvmlDeviceGetMigMode, handle)
        return mode is not None and bool(mode[0])

    def _instances(self, parent: Device, handle: Any) -> list[tuple[Device, Any]]:
        nvml = self._nvml
        found: list[tuple[Device, Any]] = []
        for index in range(said(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            instance = said(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if instance is not None:
                found.append((self._read(instance, parent), instance))
        if not found:
            log.warning(
                "%s is not offered: it is cut into instances and has none. Make some, or end its MIG mode, and start "
                "the agent again",
                parent.uuid,
            )
        return found

    def _links(self) -> tuple[DeviceLink, ...]:
        """Between whole GPUs: a process can use one instance only."""
        whole = [(uuid, handle) for uuid, handle in self._handles.items() if uuid in self._parents]
        return tuple(
            DeviceLink(a, b, self._link(own, others))
            for (a, own), (b, others) in itertools.combinations(sorted(whole, key=lambda pair: pair[0]), 2)
        )

    def _link(self, a: Any, b: Any) -> LinkKind:
        nvml = self._nvml
        if said(nvml, nvml.nvmlDeviceGetP2PStatus, a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return LinkKind.NVLINK
        meet_at = {
            nvml.NVML_TOPOLOGY_INTERNAL: LinkKind.SWITCH,
            nvml.NVML_TOPOLOGY_SINGLE: LinkKind.SWITCH,
            nvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.SWITCHES,
            nvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.BRIDGE,
            nvml.NVML_TOPOLOGY_NODE: LinkKind.HOST,
        }
        return meet_at.get(said(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, a, b), LinkKind.SOCKETS)

    # --- error events -------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        nvml = self._nvml
        self._events = None
        events = said(nvml, nvml.nvmlEventSetCreate)
        for uuid, handle in self._parents.items():
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError as error:
                if uuid not in self._silent:
                    log.info("%s does not tell of errors: %s", uuid, error)
                self._silent.add(uuid)
            else:
                self._events = events

    def _new_xids(self) -> tuple[tuple[str, int], ...]:
        nvml = self._nvml
        found: list[tuple[str, int]] = []
        if self._events is None:
            return ()
        for _ in range(_MOST_EVENTS):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                found.append((text(nvml.nvmlDeviceGetUUID(event.device)), int(event.eventData)))
            except nvml.NVMLError:  # there is none; or NVML has gone, which reading the devices tells
                break
        return tuple(found)

    # --- when it fails ------------------------------------------------------------------------------------------------

    def _open_again(self) -> None:
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            if not self._is_away:
                log.info("NVML does not come back: %s", error)
            self._is_away = True
            return
        self._is_away = False
        for handles in (self._handles, self._parents):
            for uuid in handles:
                with contextlib.suppress(nvml.NVMLError):  # one that has gone keeps its old handle, which says so
                    handles[uuid] = nvml.nvmlDeviceGetHandleByUUID(uuid)
        with contextlib.suppress(nvml.NVMLError):
            self._listen()

    def _none(self, why: str) -> Found:
        log.info("no GPUs: %s", why)
        return Found((self._pool,))
