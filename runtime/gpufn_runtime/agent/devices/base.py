"""What finds devices, and what it says of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from gpufn_core.domain.device import Device, DeviceLink, Health
from gpufn_core.domain.device_metrics import DeviceMetrics


@dataclass(frozen=True)
class Found:
    """A node's devices, the links between its GPUs, and the versions of the driver and of the newest CUDA it takes."""

    devices: tuple[Device, ...]
    links: tuple[DeviceLink, ...] = ()
    driver: str = ""
    cuda: str = ""


@dataclass(frozen=True)
class Trouble:
    """A device could not be asked."""

    health: Health
    reason: str


@dataclass(frozen=True)
class Sample:
    """`xids` are the error events since the last sample: a GPU's uuid and the event's number."""

    metrics: tuple[DeviceMetrics, ...] = ()
    xids: tuple[tuple[str, int], ...] = ()
    troubles: dict[str, Trouble] = field(default_factory=dict)  # by uuid


class Inventory(Protocol):
    def find(self) -> Found:
        """What this node has when the agent starts. Never raises: what cannot be read is not there."""
        ...

    def sample(self) -> Sample:
        """How the GPUs are now. Never raises. May block, as a sick driver does: call it in a thread."""
        ...
