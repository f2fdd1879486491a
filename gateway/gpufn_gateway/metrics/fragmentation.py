"""Fragmentation of a node's GPU memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpufn_core.domain.devices.device import Device, DeviceType, Health
from gpufn_gateway.controller.placement.gpus import available_bytes
from gpufn_gateway.controller.state.leases import NodeUse


def fragmentation(devices: Iterable[Device], used: NodeUse) -> float | None:
    """Return the part of the free GPU memory that is on GPUs in use. A worker that needs a whole GPU cannot have it.

    None without a healthy GPU. 0.0 if nothing is free, since nothing is lost then.
    """
    gpus = [device for device in devices if device.type is DeviceType.GPU and device.health is Health.HEALTHY]
    if not gpus:
        return None
    free = {device.uuid: max(0, available_bytes(device, used.gpus.get(device.uuid))) for device in gpus}
    total = sum(free.values())
    on_used = sum(count for uuid, count in free.items() if uuid in used.gpus)
    return on_used / total if total else 0.0
