"""Which GPUs of one node a worker gets. Pure.

1. Filter: GPUs of the kind that are healthy and that the share can be had of. A GPU is in the mode of its first tenant
   until it is empty; workers that are parked keep it in theirs.
2. Order: a part by MPS of a GPU that is shared already, and of those the fullest, so that whole ones stay free; by time
   one where a turn is free, and of those one that is shared already; of whole ones the smallest that does, the closest
   to each other, and those whose going tears the fewest links.

Sizes and trust domains come last: many workers differ in nothing else, and look through the same `Opening`s.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from gpufn_core.domain.device import Device, DeviceLink, Health, LinkKind, MpsLevel, Share
from gpufn_core.domain.gpu_fair_queue import TURNS_PER_GPU
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.state.leases import GpuUse, Used

ANY_KIND = "any"
_MOST_COMPARED: Final = 16  # choosing 8 of them is 12,870 sets to look at
_PARKED_PART: Final = 10  # so much of a whole GPU may be what parked workers have left there

Score = tuple[float, ...]  # lower is better


class Opening(msgspec.Struct, frozen=True):
    """Room for one more on a GPU that is shared, or will be; the one with the lowest `rank` is taken. `sm_percent` is
    what the ceilings there add up to. `domain` is the trust domain of those who may come; None: all may."""

    device: Device
    rank: Score
    left_bytes: int
    sm_percent: int
    domain: str | None


class GpuFit(msgspec.Struct, frozen=True):
    gpus: tuple[Device, ...]
    score: Score


class Lack(enum.Enum):
    """Why a GPU cannot be had."""

    SICK = enum.auto()
    IN_USE = enum.auto()
    SHARED_BY = enum.auto()
    DOMAIN = enum.auto()
    FULL = enum.auto()
    MEMORY = enum.auto()
    INSTANCE = enum.auto()
    CONTAINED = enum.auto()
    NOT_CONTAINED = enum.auto()
    PARKED = enum.auto()


def has_kind(device: Device, wanted: str) -> bool:
    """Whether `wanted`, as in ``gpu="L4"``, names this device: "L4" is in "NVIDIA L4", and "any" is every GPU.

    A MIG instance ("NVIDIA A100 MIG 1g.5gb") is named by what only it has in its name: "MIG 1g.5gb", not "A100".
    """
    name = wanted.lower()
    if name == ANY_KIND:
        return True
    kind = device.kind.lower()
    return name in kind and not (device.parent and name in kind.partition(" mig ")[0])


def named_by(resources: Resources, kind: str, gpus: Iterable[Device]) -> tuple[Device, ...]:
    """Those of the kind; several are never instances, for a process can use one instance, not two."""
    return tuple(
        device for device in gpus if has_kind(device, kind) and not (device.parent and resources.gpu_count > 1)
    )


def lack(  # noqa: PLR0911 - one line per reason
    resources: Resources, device: Device, use: GpuUse | None, limits: Limits, *, contained: bool
) -> Lack | None:
    """Whatever size is asked for and whoever asks, so never MEMORY or DOMAIN. `use`: what is leased of it; `contained`:
    the worker is to live in a container."""
    share = resources.share
    if device.health is not Health.HEALTHY:
        return Lack.SICK
    if share is Share.MPS and device.parent:
        return Lack.INSTANCE
    if use is None:
        return None
    if not use.workers and (use.mode is not share or _leave_too_much(use, device)):
        return Lack.PARKED
    if share is Share.EXCLUSIVE or use.mode is Share.EXCLUSIVE:
        return Lack.IN_USE if use.workers else None
    if use.mode is not share:
        return Lack.SHARED_BY
    if share is Share.MPS and use.contained is not contained:
        return Lack.CONTAINED if use.contained else Lack.NOT_CONTAINED
    if use.workers + use.parked >= (limits.mps_clients_per_gpu if share is Share.MPS else limits.time_shares_per_gpu):
        return Lack.FULL
    return None


def _leave_too_much(parked: GpuUse, device: Device) -> bool:
    return parked.mode is Share.EXCLUSIVE and parked.vram_bytes > device.memory_bytes // _PARKED_PART


def has_mps_for(resources: Resources, report: NodeReport) -> bool:
    return resources.share is not Share.MPS or report.facts.mps is not MpsLevel.NONE


def left_bytes(device: Device, use: GpuUse | None) -> int:
    return device.memory_bytes - (use.vram_bytes if use is not None else 0)


def domain_of(use: GpuUse | None, limits: Limits) -> str | None:
    return use.trust_domain if use is not None and not limits.share_across_domains else None


def openings(
    resources: Resources, gpus: Iterable[Device], used: Used, limits: Limits, *, contained: bool
) -> tuple[Opening, ...]:
    """Of GPUs of the kind, for a share; in the order in which they are taken."""
    found: list[Opening] = []
    for device in gpus:
        use = used.gpus.get(device.uuid)
        if lack(resources, device, use, limits, contained=contained) is None:
            sm_percent = use.sm_percent if use is not None else 0
            left = left_bytes(device, use)
            rank: Score = (use is None, left)
            if resources.share is Share.TIME:
                workers = use.workers if use is not None else 0
                waits = max(0, workers - TURNS_PER_GPU + 1)  # for a turn, when all want one
                rank = (waits, *rank)
            found.append(Opening(device, rank, left, sm_percent, domain_of(use, limits)))
    return tuple(sorted(found, key=lambda each: (each.rank, each.device.uuid)))


def part(openings: Iterable[Opening], resources: Resources) -> GpuFit | None:
    """The first that has the memory, in the order of `openings`; one whose ceilings stay within 100 % goes before."""
    vram_bytes, most_percent = resources.vram_bytes or 0, 100 - (resources.sm_percent or 0)
    best: Opening | None = None
    for each in openings:
        if each.left_bytes < vram_bytes or (each.domain is not None and each.domain != resources.trust_domain):
            continue
        if each.sm_percent <= most_percent:
            best = each
            break
        best = best or each
    if best is None:
        return None
    return GpuFit((best.device,), (best.sm_percent > most_percent, *best.rank))


def whole(free: Sequence[Device], count: int, links: Iterable[DeviceLink]) -> GpuFit | None:
    """`count` GPUs of one model, of those that are free."""
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
