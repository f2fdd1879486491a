"""Resources that one worker needs from a node: Resources, a part of FunctionSpec. Frozen and self-validating."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from gpufn_core.domain.devices.device import Share
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.units import MIN_PROCESS_BYTES, Bounds, check_fields, check_least_bytes, parse_bytes

DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_GPU = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9 ._-]*)(?::(?P<count>\d{1,3}))?")
_MOST_GPUS = 16
_MOST_NODES = 64
MIN_VRAM_BYTES = 64 << 20  # MPS limits are in whole MiB; a CUDA context alone uses more than this


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Resources of one worker.

    `gpu` lists acceptable device names in order of preference; empty means no GPU. A worker gets `gpu_count` GPUs of
    one name. `cpu` is in cores and reserves CPU time, not dedicated cores. `memory_bytes`, if set, is reserved and
    enforced. Under MPS, `vram_bytes` of GPU memory is reserved and enforced, and `sm_percent` caps the share of the
    GPU's multiprocessors. Only functions of the same `trust_domain` share a GPU. With several `nodes` a worker is a
    gang: one process on each of so many nodes, each with these resources.
    """

    bounds: ClassVar[Mapping[str, Bounds]] = {
        "cpu": Bounds("cpu", 0.01, 1024),
        "gpu_count": Bounds("gpu", 1, _MOST_GPUS, is_whole=True),
        "nodes": Bounds("nodes", 1, _MOST_NODES, is_whole=True),
        "sm_percent": Bounds("sm", 1, 100, is_whole=True, may_be_none=True),
    }

    gpu: tuple[str, ...] = ()
    share: Share = Share.EXCLUSIVE
    cpu: float = 0.1
    memory_bytes: int | None = None
    gpu_count: int = 1
    vram_bytes: int | None = None
    sm_percent: int | None = None
    trust_domain: str = ""
    nodes: int = 1

    def __post_init__(self) -> None:
        check_fields(self, self.bounds)
        if self.memory_bytes is not None:
            check_least_bytes("memory", parse_bytes(self.memory_bytes), MIN_PROCESS_BYTES, "a Python process")
        if self.trust_domain and DOMAIN.fullmatch(self.trust_domain) is None:
            raise InvalidSpec(f"trust_domain={self.trust_domain!r}: use a to z, 0 to 9 and hyphens, at most 40 of them")
        if self.share is Share.MPS:
            self._check_fraction()
        elif self.vram_bytes is not None or self.sm_percent is not None:
            option = "sm" if self.vram_bytes is None else "vram"
            raise InvalidSpec(f"{option}=... is a limit that only share='mps' has, not share={self.share.value!r}")
        if self.share is not Share.EXCLUSIVE and self.gpu_count > 1:
            raise InvalidSpec(
                f"share={self.share.value!r} is a part of one GPU, and gpu=... asks for {self.gpu_count}: "
                "several GPUs are exclusive"
            )
        if self.share is not Share.EXCLUSIVE and self.nodes > 1:
            raise InvalidSpec(
                f"share={self.share.value!r} is a part of one GPU, and nodes={self.nodes}: the GPUs of several nodes "
                "are exclusive; remove share"
            )

    def _check_fraction(self) -> None:
        if not self.gpu:
            raise InvalidSpec("share='mps' is a part of a GPU, and gpu=... asks for none: write for example gpu='any'")
        if self.vram_bytes is None:
            raise InvalidSpec("share='mps' needs a limit of GPU memory: write for example vram='6Gi'")
        check_least_bytes("vram", parse_bytes(self.vram_bytes), MIN_VRAM_BYTES, "a CUDA context under MPS")


def parse_gpu(gpu: Any) -> tuple[tuple[str, ...], int]:
    """Return the acceptable GPU names, and the number of GPUs of one worker, of the option `gpu`. Raises InvalidSpec.

    >>> parse_gpu(None), parse_gpu(["H100:2", "L4:2"])
    (((), 1), (('H100', 'L4'), 2))
    """
    if gpu is None:
        return (), 1
    choices = (gpu,) if isinstance(gpu, str) else gpu
    if not isinstance(choices, (list, tuple)) or not choices:
        raise InvalidSpec(f"gpu is None, 'any', a name such as 'L4', or a list of names, not {gpu!r}")
    names: list[str] = []
    counts: set[int] = set()
    for choice in choices:
        match = _GPU.fullmatch(choice) if isinstance(choice, str) else None
        if match is None:
            raise InvalidSpec(f"gpu: {choice!r} is not the name of a GPU; write for example 'L4', 'any' or 'H100:2'")
        if match["name"].lower() == "cpu":
            raise InvalidSpec(f"gpu={choice!r} is not a GPU; leave gpu out to run on the CPU")
        names.append(match["name"])
        counts.add(int(match["count"] or 1))
    if len(counts) > 1:
        raise InvalidSpec(
            f"gpu={gpu!r}: a worker has the same number of GPUs on every node; write the same number after each name"
        )
    return tuple(names), counts.pop()
