"""Devices and shares of them: what a Node offers, what a Worker is granted."""

from __future__ import annotations

import enum

import msgspec


class DeviceType(enum.StrEnum):
    CPU = "cpu"
    GPU = "gpu"


class Device(msgspec.Struct, frozen=True):
    """A GPU or the CPU pool of a node.

    `kind` is the model name as the driver tells it ("NVIDIA L4"); `cores` is 0 for a GPU.
    """

    uuid: str
    type: DeviceType
    kind: str
    memory_bytes: int
    cores: float = 0.0
    compute_capability: str = ""


class DeviceShare(msgspec.Struct, frozen=True):
    """A part of a node: always some of its CPU pool, and a whole GPU, a part of one, or none."""

    cpu_device: str
    cores: float
    memory_bytes: int
    gpu_device: str | None = None
    exclusive: bool = False
