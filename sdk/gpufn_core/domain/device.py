"""Devices and shares of them: what a Node offers, what a Worker is granted."""

from __future__ import annotations

import enum

import msgspec


class DeviceType(enum.StrEnum):
    CPU = "cpu"
    GPU = "gpu"


class Share(enum.StrEnum):
    EXCLUSIVE = "exclusive"
    MPS = "mps"
    TIME = "time"


class Health(enum.StrEnum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"  # what runs goes on, nothing new is placed
    FAILED = "failed"  # nothing runs there


class Device(msgspec.Struct, frozen=True, omit_defaults=True):
    """A GPU, an instance that one was cut into (MIG), or the CPU pool of a node.

    `kind` is the model name as the driver tells it ("NVIDIA L4"); `cores` is 0 for a GPU. `memory_bytes` is what
    processes can have of it. `multiprocessors` 0 means unknown.
    """

    uuid: str
    type: DeviceType
    kind: str
    memory_bytes: int
    cores: float = 0.0
    compute_capability: str = ""
    multiprocessors: int = 0
    parent: str = ""  # the uuid of the GPU that an instance is cut from
    health: Health = Health.HEALTHY
    health_reason: str = ""


class LinkKind(enum.IntEnum):
    """What two GPUs of a node reach each other through, the slowest first."""

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
    """What of MPS a node can do; each level has what is below it."""

    NONE = "none"
    V2 = "v2"  # a control daemon per GPU: limits by a client's environment
    V3 = "v3"  # driver r615 and later: namespaces
    V3_MEMORY = "v3_memory"  # and memory limits of cgroups, held by the kernel


class NodeFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node's software is. Text is empty where nothing is known."""

    driver: str = ""
    cuda: str = ""
    mps: MpsLevel = MpsLevel.NONE
    container_runtime: str = ""  # of GPUs in containers: "nvidia", when Docker knows it


class DeviceShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a node: always some of its CPU pool, and GPUs, a part of one, or none.

    Several GPUs are always exclusive. Under MPS `vram_bytes` is a limit for each process and `sm_percent` a ceiling,
    100 for none. Who shares a GPU is of one `trust_domain`, and under MPS all live in containers (`contained`) or none.
    `gpu_part` is what it is charged of each GPU: all of it, and under MPS its ceiling, or without one its part of the
    GPU's memory.
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
