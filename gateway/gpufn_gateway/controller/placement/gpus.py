"""The choice of GPUs on one node for a worker. Pure.

1. Filter: healthy GPUs of the kind that are available for the share. A GPU is in the mode of its first tenant until it
   is empty; parked workers keep it in their mode.
2. Order. By MPS: a GPU that is shared already, the fullest first, so that whole GPUs stay free. By time: a GPU with a
   free turn, preferably a GPU that is already shared. Whole GPUs: the smallest that suffice, the closest to each other,
   and GPUs that split the fewest links among the remaining GPUs.

Sizes and trust domains are checked last: many workers differ in nothing else and look through the same `Opening`s.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceLink, Health, LinkKind, MpsLevel, Share, has_kind
from gpufn_core.domain.devices.gpu_fair_queue import TURNS_PER_GPU
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.state.leases import GpuUse, NodeUse

_MAX_COMPARED: Final = 16  # choosing 8 of 16 means comparing 12,870 sets
_HELD_PART: Final = 10  # parked workers may hold one tenth of a whole GPU; processes of others, too

Score = tuple[float, ...]  # lower is better


class Opening(msgspec.Struct, frozen=True):
    """Room for one more worker on a GPU that is or can be shared; the lowest `rank` is taken first. `sm_percent` is the
    sum of the ceilings there. `domain` is the trust domain that may use it; None: any."""

    device: Device
    rank: Score
    available_bytes: int
    sm_percent: int
    domain: str | None


class GpuFit(msgspec.Struct, frozen=True):
    gpus: tuple[Device, ...]
    score: Score


class Unavailable(enum.Enum):
    """Why a GPU is not available."""

    UNHEALTHY = enum.auto()
    IN_USE = enum.auto()
    SHARED_BY = enum.auto()
    DOMAIN = enum.auto()
    FULL = enum.auto()
    MEMORY = enum.auto()
    INSTANCE = enum.auto()
    CONTAINED = enum.auto()
    NOT_CONTAINED = enum.auto()
    PARKED = enum.auto()
    FOREIGN = enum.auto()


def matching_gpus(resources: Resources, kind: str, gpus: Iterable[Device]) -> tuple[Device, ...]:
    """Return the GPUs of the kind. Without MIG instances if several are wanted: a process can use only one instance."""
    return tuple(
        device for device in gpus if has_kind(device, kind) and not (device.parent and resources.gpu_count > 1)
    )


def why_unavailable(  # noqa: PLR0911 - one line per reason
    resources: Resources, device: Device, use: GpuUse | None, limits: Limits, *, contained: bool
) -> Unavailable | None:
    """Return why the GPU is not available, for requests of any size and trust domain: never MEMORY or DOMAIN. `use` is
    the leased share of the GPU; `contained`: the worker is to run in a container."""
    share = resources.share
    if device.health is not Health.HEALTHY:
        return Unavailable.UNHEALTHY
    if share is Share.MPS and device.parent:
        return Unavailable.INSTANCE
    if share is Share.EXCLUSIVE and device.foreign_bytes > device.memory_bytes // _HELD_PART:
        return Unavailable.FOREIGN
    if use is None:
        return None
    if not use.workers and (use.mode is not share or _hold_too_much(use, device)):
        return Unavailable.PARKED
    if share is Share.EXCLUSIVE or use.mode is Share.EXCLUSIVE:
        return Unavailable.IN_USE if use.workers else None
    if use.mode is not share:
        return Unavailable.SHARED_BY
    if share is Share.MPS and use.contained is not contained:
        return Unavailable.CONTAINED if use.contained else Unavailable.NOT_CONTAINED
    if use.workers + use.parked >= (limits.mps_clients_per_gpu if share is Share.MPS else limits.time_shares_per_gpu):
        return Unavailable.FULL
    return None


def _hold_too_much(parked: GpuUse, device: Device) -> bool:
    return parked.mode is Share.EXCLUSIVE and parked.vram_bytes > device.memory_bytes // _HELD_PART


def has_mps_for(resources: Resources, report: NodeReport) -> bool:
    return resources.share is not Share.MPS or report.facts.mps is not MpsLevel.NONE


def available_bytes(device: Device, use: GpuUse | None) -> int:
    return device.memory_bytes - device.foreign_bytes - (use.vram_bytes if use is not None else 0)


def domain_of(use: GpuUse | None, limits: Limits) -> str | None:
    return use.trust_domain if use is not None and not limits.share_across_domains else None


def openings(
    resources: Resources, gpus: Iterable[Device], used: NodeUse, limits: Limits, *, contained: bool
) -> tuple[Opening, ...]:
    """Return the openings for a share on GPUs of the kind, in the order in which they are taken."""
    result: list[Opening] = []
    for device in gpus:
        use = used.gpus.get(device.uuid)
        if why_unavailable(resources, device, use, limits, contained=contained) is None:
            sm_percent = use.sm_percent if use is not None else 0
            free_bytes = available_bytes(device, use)
            rank: Score = (use is None, free_bytes)
            if resources.share is Share.TIME:
                workers = use.workers if use is not None else 0
                waits = max(0, workers - TURNS_PER_GPU + 1)  # for a turn, when all workers want one
                rank = (waits, *rank)
            result.append(Opening(device, rank, free_bytes, sm_percent, domain_of(use, limits)))
    return tuple(sorted(result, key=lambda each: (each.rank, each.device.uuid)))


def choose_share(openings: Iterable[Opening], resources: Resources, domain: str) -> GpuFit | None:
    """Return the first opening in the trust domain with enough memory, preferring an opening whose ceilings stay within
    100 %."""
    vram_bytes, most_percent = resources.vram_bytes or 0, 100 - (resources.sm_percent or 0)
    best: Opening | None = None
    for opening in openings:
        if opening.available_bytes < vram_bytes or opening.domain not in (None, domain):
            continue
        if opening.sm_percent <= most_percent:
            best = opening
            break
        best = best or opening
    if best is None:
        return None
    return GpuFit((best.device,), (best.sm_percent > most_percent, *best.rank))


def choose_whole(free: Sequence[Device], count: int, links: Iterable[DeviceLink]) -> GpuFit | None:
    """Return `count` free GPUs of one model."""
    uuids = {device.uuid for device in free}
    # A link that is neither NVLink nor known counts as the slowest; unknown links are equal.
    closeness = {(a, b): link.kind for link in links for a, b in ((link.a, link.b), (link.b, link.a))}
    best: GpuFit | None = None
    for model in {device.kind: None for device in free}:
        of_model = sorted((device for device in free if device.kind == model), key=lambda device: device.uuid)
        for chosen in itertools.combinations(of_model[:_MAX_COMPARED], count):
            own = {device.uuid for device in chosen}
            inside = [closeness.get(pair, LinkKind.SOCKETS) for pair in itertools.combinations(own, 2)]
            torn = sum(closeness.get((a, b), LinkKind.SOCKETS) for a in own for b in uuids - own) if closeness else 0
            memory_bytes = sum(device.memory_bytes for device in chosen)
            score = (-min(inside, default=0), -sum(inside), memory_bytes, torn, len(free) - count)
            if best is None or score < best.score:
                best = GpuFit(chosen, score)
    return best
