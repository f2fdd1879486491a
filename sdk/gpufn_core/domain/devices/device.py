"""Devices and their shares: the resources that a node offers and a worker leases."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

import msgspec

# Keeps CUDA away from an MPS daemon of the host. CUDA looks for one in /tmp/nvidia-mps by default, and NVIDIA's
# container hook mounts that folder. In a folder that does not exist, CUDA finds none.
NO_MPS: Final[Mapping[str, str]] = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent/mps"}

ANY_KIND: Final = "any"  # in `gpu=`: every kind of GPU


class DeviceType(enum.StrEnum):
    CPU = "cpu"
    GPU = "gpu"


class Share(enum.StrEnum):
    EXCLUSIVE = "exclusive"
    MPS = "mps"
    TIME = "time"


class Health(enum.StrEnum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"  # running workers continue, no new worker is placed
    FAILED = "failed"  # nothing runs there


class Device(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU, a MIG instance of a GPU, or the CPU pool of a node.

    `kind` is the model name as the driver reports it ("NVIDIA L4"); `cores` is 0 for a GPU. `memory_bytes` is the
    memory available to processes. `multiprocessors` of 0 means unknown.
    """

    uuid: str
    type: DeviceType
    kind: str
    memory_bytes: int
    cores: float = 0.0
    compute_capability: str = ""
    multiprocessors: int = 0
    foreign_bytes: int = 0  # GPU memory held by processes outside the platform, in steps of 256 MiB
    parent: str = ""  # the uuid of the GPU of a MIG instance
    health: Health = Health.HEALTHY
    health_reason: str = ""


def has_kind(device: Device, wanted: str) -> bool:
    """Return whether `wanted`, as in ``gpu="L4"``, names this device: "L4" is in "NVIDIA L4", and "any" is every GPU.

    A MIG instance ("NVIDIA A100 MIG 1g.5gb") is named only by the part that its parent's name lacks: "MIG 1g.5gb", not
    "A100".
    """
    name = wanted.lower()
    if name == ANY_KIND:
        return True
    kind = device.kind.lower()
    return name in kind and not (device.parent and name in kind.partition(" mig ")[0])


class LinkKind(enum.IntEnum):
    """The connection between two GPUs of a node, the slowest first."""

    SOCKETS = 0  # from one CPU to another
    HOST = 1  # within one CPU, over several PCIe host bridges
    BRIDGE = 2  # one PCIe host bridge
    SWITCHES = 3  # several PCIe switches
    SWITCH = 4  # one PCIe switch, or one board
    NVLINK = 5


class DeviceLink(msgspec.Struct, frozen=True, array_like=True):
    a: str
    b: str
    kind: LinkKind


class MpsLevel(enum.StrEnum):
    """The MPS features of a node; each level includes those above."""

    NONE = "none"
    V2 = "v2"  # a control daemon per GPU: limits set by environment variables of the client
    V3 = "v3"  # driver r615 and later: namespaces
    V3_MEMORY = "v3_memory"  # also memory limits by cgroups, enforced by the kernel


class NodeFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The software of a node. Text is empty if unknown.

    `power_limits` are the limits in watts of the GPUs that the operator's setting is about, by uuid, as they were when
    the agent started. `power_limit_notices` are the reasons why a limit differs from the setting.
    """

    driver: str = ""
    cuda: str = ""
    mps: MpsLevel = MpsLevel.NONE
    has_own_pids: bool = False  # its agent is in its own pid namespace: the driver's pids mean nothing there
    power_limits: dict[str, float] = {}
    power_limit_notices: tuple[str, ...] = ()


class DeviceShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a node: always a part of its CPU pool, plus whole GPUs, a part of one GPU, or none.

    Several GPUs are always exclusive. Under MPS `vram_bytes` is a limit for each process and `sm_percent` a ceiling;
    100 means none. Workers that share a GPU have the same `trust_domain`. Under MPS, either all or none of them run in
    containers (`contained`). `gpu_part` is the part of each GPU that is charged: 1, or under MPS the ceiling, or
    without a ceiling the part of the GPU's memory.
    """

    cpu_device: str
    cores: float
    memory_bytes: int
    gpus: tuple[str, ...] = ()
    mode: Share = Share.EXCLUSIVE
    vram_bytes: int = 0
    sm_percent: int = 100
    trust_domain: str = ""
    contained: bool = False
    gpu_part: float = 1.0

    @property
    def gpus_charged(self) -> float:
        """The GPU seconds that each second of a process costs."""
        return len(self.gpus) * self.gpu_part
