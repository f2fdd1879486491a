"""GPUs as NVIDIA's driver tells: uuid, name, memory, compute capability.

nvidia-ml-py is imported when asked, for a node without GPUs has no need of it.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from gpufn.device import Device, DeviceType

log = logging.getLogger(__name__)


class NvmlInventory:
    """No library or no driver means no GPUs; this is said once."""

    def __init__(self) -> None:
        self._has_said_why_not = False

    def devices(self) -> tuple[Device, ...]:
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return self._none("nvidia-ml-py is not installed")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            return self._none(f"the NVIDIA driver does not answer: {error}")
        try:
            return tuple(_read(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount()))
        except nvml.NVMLError as error:
            return self._none(f"the GPUs cannot be read: {error}")
        finally:
            nvml.nvmlShutdown()

    def _none(self, why: str) -> tuple[Device, ...]:
        if not self._has_said_why_not:
            self._has_said_why_not = True
            log.info("no GPUs: %s", why)
        return ()


def _read(nvml: Any, handle: Any) -> Device:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        type=DeviceType.GPU,
        kind=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=f"{major}.{minor}",
    )


def _text(value: str | bytes) -> str:
    """Older releases of the library answer bytes."""
    return value.decode() if isinstance(value, bytes) else value
