"""Interface of a device inventory, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from gpufn_core.domain.devices.device import Device, DeviceLink, Health
from gpufn_core.domain.devices.device_metrics import DeviceMetrics


@dataclass(frozen=True)
class FoundDevices:
    """A node's devices, the links between its GPUs, the driver's version and the newest CUDA version it supports."""

    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...] = ()
    driver: str = ""
    cuda: str = ""


@dataclass(frozen=True)
class HealthCondition:
    """A device that is not healthy, and why: it did not respond, or MPS reported a fault."""

    health: Health
    reason: str


@dataclass(frozen=True)
class Sample:
    """Metrics of one round. `xids` are the error events since the last sample: GPU uuid and Xid number."""

    metrics: tuple[DeviceMetrics, ...] = ()
    xids: tuple[tuple[str, int], ...] = ()
    conditions: dict[str, HealthCondition] = field(default_factory=dict)  # by uuid


class Inventory(Protocol):
    def find(self) -> FoundDevices:
        """Return this node's devices at the agent's start. Never raises; unreadable devices are omitted."""

    def sample(self) -> Sample:
        """Return the GPUs' current metrics. Never raises. May block if a driver hangs: call it in a thread."""
