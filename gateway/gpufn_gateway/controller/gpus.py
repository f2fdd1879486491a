"""Which GPUs of one node a worker gets: `choose(...) -> GpuFit | str`. Pure.

1. Filter: GPUs of the kind that are healthy and that the share can be had of. A GPU is in the mode of its first tenant
   until it is empty.
2. Score, lower is better: a shared GPU that is shared already, and of those the fullest, so that whole ones stay free;
   of whole ones the smallest that does, the closest to each other, and those whose going tears the fewest links.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from gpufn.device import Device, DeviceLink, Health, LinkKind, MpsLevel, Share
from gpufn.protocol.messages import NodeReport
from gpufn.spec import Resources

from .leases import GpuUse, Used
from .limits import Limits

ANY_KIND = "any"
_UNUSED: Final = GpuUse(Share.EXCLUSIVE, workers=0)
_MOST_COMPARED: Final = 16  # choosing 8 of them is 12,870 sets to look at


class GpuFit(msgspec.Struct, frozen=True):
    gpus: tuple[Device, ...]
    score: tuple[float, ...]


class _Lack(enum.Enum):
    """Why a GPU cannot be had, for one and for several. `{}` is what is said of the worst of them."""

    SICK = ("is {}", "are {}")
    IN_USE = ("is in use", "are in use")
    SHARED_BY = ("is shared by {}", "are shared by {}")
    DOMAIN = ("is shared within another trust domain", "are shared within other trust domains")
    FULL = ("is shared by as many as can be", "are shared by as many as can be")
    MEMORY = ("has too little memory: {}", "have too little memory: {}")
    INSTANCE = ("is a MIG instance, which has no shares by mps", "are MIG instances, which have no shares by mps")


def has_kind(device: Device, wanted: str) -> bool:
    """Whether `wanted`, as in ``gpu="L4"``, names this device: "L4" is in "NVIDIA L4", and "any" is every GPU.

    A MIG instance ("NVIDIA A100 MIG 1g.5gb") is named by what only it has in its name: "MIG 1g.5gb", not "A100".
    """
    name = wanted.lower()
    if name == ANY_KIND:
        return True
    kind = device.kind.lower()
    return name in kind and not (device.parent and name in kind.partition(" mig ")[0])


def choose(
    resources: Resources, kind: str, gpus: Sequence[Device], *, report: NodeReport, used: Used, limits: Limits
) -> GpuFit | str:
    """The GPUs to take of `gpus`, which are those of this `kind`; or what is missing, in words."""
    if resources.gpu_count > 1:
        gpus = [device for device in gpus if not device.parent]  # a process can use one instance, not two
    named = "" if kind.lower() == ANY_KIND else f" {kind}"
    if not gpus:
        return f"it has no{named} GPU"
    if resources.share is Share.MPS and report.facts.mps is MpsLevel.NONE:
        return "it has no MPS: nvidia-cuda-mps-control is not there"
    free: list[Device] = []
    lacks: list[tuple[_Lack, str, Device]] = []
    uses = used.gpus
    for device in gpus:
        lack = _lack(resources, device, uses.get(device.uuid), limits)
        if lack is None:
            free.append(device)
        else:
            lacks.append((*lack, device))
    if resources.share is Share.EXCLUSIVE:
        fit = _whole(free, resources.gpu_count, report.links)
    else:
        fit = _shared(free, resources, used)
    return fit or _told(named, resources.gpu_count, len(free), lacks)


def _lack(  # noqa: PLR0911 - one line per reason
    resources: Resources, device: Device, use: GpuUse | None, limits: Limits
) -> tuple[_Lack, str] | None:
    share = resources.share
    if device.health is not Health.HEALTHY:
        return _Lack.SICK, f"{device.health.value} ({device.health_reason})" if device.health_reason else device.health
    if share is Share.MPS and device.parent:
        return _Lack.INSTANCE, ""
    if use is not None:
        if share is Share.EXCLUSIVE or use.mode is Share.EXCLUSIVE:
            return _Lack.IN_USE, ""
        if use.mode is not share:
            return _Lack.SHARED_BY, use.mode.value
        if use.trust_domain != resources.trust_domain and not limits.share_across_domains:
            return _Lack.DOMAIN, ""
        if use.workers >= (limits.mps_clients_per_gpu if share is Share.MPS else limits.time_shares_per_gpu):
            return _Lack.FULL, ""
    if resources.vram_bytes is not None:
        left_bytes = device.memory_bytes - (use.vram_bytes if use is not None else 0)
        if left_bytes < resources.vram_bytes:
            return _Lack.MEMORY, f"{size(resources.vram_bytes)} are needed, {size(left_bytes)} are free"
    return None


def _shared(free: Sequence[Device], resources: Resources, used: Used) -> GpuFit | None:
    """The best by score, and by name where scores are equal."""
    scored: list[tuple[tuple[float, ...], str, Device]] = []
    for device in free:
        use = used.gpus.get(device.uuid, _UNUSED)
        left_bytes = device.memory_bytes - (resources.vram_bytes or 0) - use.vram_bytes
        score = (use.sm_percent + (resources.sm_percent or 0) > 100, use is _UNUSED, left_bytes)
        scored.append((score, device.uuid, device))
    if not scored:
        return None
    best, _, chosen = min(scored)  # names differ, so devices are never compared
    return GpuFit((chosen,), best)


def _whole(free: Sequence[Device], count: int, links: Iterable[DeviceLink]) -> GpuFit | None:
    """`count` GPUs of one model."""
    uuids = {device.uuid for device in free}
    # What is neither NVLink nor known counts as the slowest; two that cannot be told apart are equal.
    closeness = {(a, b): link.kind for link in links for a, b in ((link.a, link.b), (link.b, link.a))}
    best: GpuFit | None = None
    for model in {device.kind: None for device in free}:
        of_model = sorted((device for device in free if device.kind == model), key=lambda device: device.uuid)
        for chosen in itertools.combinations(of_model[:_MOST_COMPARED], count):
            own = {device.uuid for device in chosen}
            inside = [closeness.get(pair, LinkKind.SOCKETS) for pair in itertools.combinations(own, 2)]
            torn = sum(closeness.get((a, b), LinkKind.SOCKETS) for a in own for b in uuids - own) if closeness else 0
            memory_bytes = sum(device.memory_bytes for device in chosen)
            score = (-min(inside, default=0), -sum(inside), memory_bytes, torn, len(free) - count)
            if best is None or score < best.score:
                best = GpuFit(chosen, score)
    return best


def _told(named: str, count: int, free: int, lacks: Sequence[tuple[_Lack, str, Device]]) -> str:
    """As ``of its 3 L4 GPUs 2 are in use and 1 is degraded (it is hot)``."""
    total = free + len(lacks)
    if total < count:
        return f"needs {count}{named} GPUs, it has {total}"
    grouped = {each: [(text, device) for lack, text, device in lacks if lack is each] for each in _Lack}
    grouped = {lack: found for lack, found in grouped.items() if found}
    if count > 1:
        lead = f"needs {count}{named} GPUs of one model, {free} of its {total} can be had"
        return f"{lead}: {_listed(grouped)}" if grouped else lead
    if len(grouped) == 1:
        ((lack, found),) = grouped.items()
        subject = f"its{named} GPU" if total == 1 else f"its {total}{named} GPUs"
        return f"{subject} {_phrase(lack, found)}"
    return f"of its {total}{named} GPUs {_listed(grouped)}"


def _listed(grouped: dict[_Lack, list[tuple[str, Device]]]) -> str:
    return ", ".join(f"{len(found)} {_phrase(lack, found)}" for lack, found in grouped.items())


def _phrase(lack: _Lack, found: Sequence[tuple[str, Device]]) -> str:
    """The words of the largest device stand for the group: where that has too little, all have."""
    singular, plural = lack.value
    text = max(found, key=lambda each: (each[1].memory_bytes, each[0]))[0]
    return (singular if len(found) == 1 else plural).format(text)


def size(count: int) -> str:
    if count < 0:
        return "0 MiB"
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
