"""Where a worker can run: `place(resources, nodes, leases) -> Placement | NoRoom`.

1. Filter: a node that can start a process, or its container; a device that the models have engines for; a GPU of an
   acceptable kind, in the order of preference; host memory; cores.
2. Score: a node whose cores are not oversubscribed; for a function without a GPU, a node without free ones; then the
   tightest fit, which leaves the largest hole for what comes next.

Many workers are placed at a time, and each changes one node: what a node offers to all requests that differ in sizes
and trust domains only is computed once, and kept in the book's notes while the node's devices and leases stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpufn_core.domain.device import Device, DeviceShare, Health, Share
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.gpus import (
    GpuFit,
    Opening,
    Score,
    domain_of,
    has_mps_for,
    lack,
    left_bytes,
    openings,
    part,
    whole,
)
from gpufn_gateway.controller.placement.request import Request, Wanted, cpu_pool, gpus_of, has_cores
from gpufn_gateway.controller.placement.shortage import in_words, shortage, size
from gpufn_gateway.controller.state.leases import GpuUse, LeaseBook, Used


class Placement(msgspec.Struct, frozen=True):
    node: str
    share: DeviceShare
    why: str


class NoRoom(msgspec.Struct, frozen=True):
    """`of_any_size`: nor for any request that differs in sizes and trust domains only."""

    of_any_size: bool = False


class _Offer(msgspec.Struct, frozen=True):
    """What is left of a node for requests that look at the same of it: parts of GPUs (`openings`), or the one choice of
    GPUs, or of none, that is best for all of them (`fit`). No `pool`: nothing for any of them."""

    report: NodeReport
    used: Used
    pool: Device | None = None
    left_bytes: int = 0
    left_cores: float = 0.0
    idle_cores: float = 0.0  # that nobody was promised
    openings: tuple[Opening, ...] | None = None
    fit: GpuFit | None = None

    @property
    def is_empty(self) -> bool:
        return self.pool is None or not (self.fit or self.openings)


class _Fit(msgspec.Struct, frozen=True):
    """Where it could be; the lowest score wins."""

    score: Score
    offer: _Offer
    gpus: tuple[Device, ...]

    @property
    def rank(self) -> tuple[Score, str]:
        return self.score, self.offer.report.node


def place(
    resources: Resources,
    nodes: Sequence[NodeReport],
    leases: LeaseBook,
    limits: Limits | None = None,
    *,
    engine_kinds: frozenset[str] | None = None,
    in_container: bool = False,
    best: bool = True,
) -> Placement | NoRoom:
    """`engine_kinds`: the DeviceKinds that there are engines for; None for a function without models. Without `best`
    the first place that is found will do."""
    limits = limits or Limits()
    of_any_size = True
    for kind in resources.gpu or (None,):
        request = Request(resources, kind, engine_kinds, in_container)
        fits: list[_Fit] = []
        offers = leases.notes((request.looks_at, limits))
        for report in nodes:
            offer, used = offers.get(report.node), leases.used(report.node)
            if offer is None or offer.report is not report or offer.used is not used:
                offer = offers[report.node] = _offer(request, report, used, limits)
            if offer.is_empty:
                continue
            of_any_size = False
            fit = _fit(request, offer)
            if fit is not None:
                fits.append(fit)
                if not best:
                    break
        if fits:
            return _placement(request, min(fits, key=lambda fit: fit.rank))
    return NoRoom(of_any_size)


def explain(
    wanted: Wanted, nodes: Sequence[NodeReport], leases: LeaseBook, limits: Limits, *, of_any_size: bool = False
) -> str:
    """Why `place` found no room; this takes longer than to find out that there is none.

    Of several kinds of GPU the first is explained: it is the one that the user prefers."""
    first = Request(wanted.resources, next(iter(wanted.resources.gpu), None), wanted.engine_kinds, wanted.in_container)
    found = {
        report.node: shortage(first, report, leases.used(report.node), limits, of_any_size=of_any_size)
        for report in nodes
    }
    return in_words(first, found)


def returns(resources: Resources, share: DeviceShare, report: NodeReport, used: Used, limits: Limits) -> bool:
    """Whether a parked worker can have its share again. `used` is what others have of its node."""
    pool = cpu_pool(report)
    gpus = [gpu for gpu in gpus_of(report) if gpu.uuid in share.gpus]
    if pool is None or len(gpus) < len(share.gpus):
        return False
    left_cores = pool.cores * limits.cpu_oversubscription - used.cores
    if pool.memory_bytes - used.memory_bytes < share.memory_bytes or not has_cores(left_cores, share.cores):
        return False
    return all(_returns_to(gpu, resources, share, used.gpus.get(gpu.uuid), limits) for gpu in gpus)


def _returns_to(gpu: Device, resources: Resources, share: DeviceShare, use: GpuUse | None, limits: Limits) -> bool:
    if lack(resources, gpu, use, limits, contained=share.contained) is not None:
        return False
    if share.mode is Share.EXCLUSIVE:
        return True  # nobody runs there beside it; of those that are parked a new one does not ask either
    return domain_of(use, limits) in (None, share.trust_domain) and left_bytes(gpu, use) >= share.vram_bytes


def _offer(request: Request, report: NodeReport, used: Used, limits: Limits) -> _Offer:
    pool = cpu_pool(report)
    if pool is None or pool.health is not Health.HEALTHY:
        return _Offer(report, used)
    if not request.can_run_on(report) or not has_mps_for(request.resources, report):
        return _Offer(report, used)
    left_memory = pool.memory_bytes - used.memory_bytes
    left_cores = pool.cores * limits.cpu_oversubscription - used.cores
    idle_cores = pool.cores - used.cores
    if request.kind is None:
        whole_ones = sum(device.uuid not in used.gpus for device in gpus_of(report))
        return _Offer(report, used, pool, left_memory, left_cores, idle_cores, fit=GpuFit((), (whole_ones,)))
    gpus, contained = request.gpus(report), request.is_contained(report)
    wants = request.resources
    if wants.share is not Share.EXCLUSIVE:
        parts = openings(wants, gpus, used, limits, contained=contained)
        return _Offer(report, used, pool, left_memory, left_cores, idle_cores, openings=parts)
    free = [gpu for gpu in gpus if lack(wants, gpu, used.gpus.get(gpu.uuid), limits, contained=contained) is None]
    unused = [gpu for gpu in free if gpu.uuid not in used.gpus]  # where no parked worker waits to come back
    fit = whole(unused, wants.gpu_count, report.links) or whole(free, wants.gpu_count, report.links)
    return _Offer(report, used, pool, left_memory, left_cores, idle_cores, fit=fit)


def _fit(request: Request, offer: _Offer) -> _Fit | None:
    pool, wants = offer.pool, request.resources
    left_memory = offer.left_bytes - request.memory_bytes
    if pool is None or left_memory < 0 or wants.cpu > pool.cores or not request.fits_cores(offer.left_cores):
        return None
    fit = offer.fit
    if offer.openings is not None:
        fit = part(offer.openings, wants)
    if fit is None:
        return None
    is_oversubscribed = not request.fits_cores(offer.idle_cores)
    return _Fit((is_oversubscribed, *fit.score, left_memory, offer.left_cores - wants.cpu), offer, fit.gpus)


def _placement(request: Request, fit: _Fit) -> Placement:
    wants, pool, node = request.resources, fit.offer.pool, fit.offer.report.node
    assert pool is not None
    share = DeviceShare(
        cpu_device=pool.uuid,
        cores=wants.cpu,
        memory_bytes=request.memory_bytes,
        gpus=tuple(gpu.uuid for gpu in fit.gpus),
        mode=wants.share if fit.gpus else Share.EXCLUSIVE,
        vram_bytes=wants.vram_bytes or 0,
        sm_percent=wants.sm_percent or 100,
        trust_domain=wants.trust_domain,
        contained=request.is_contained(fit.offer.report),
        gpu_part=_gpu_part(wants, fit.gpus),
    )
    left = size(fit.offer.left_bytes - request.memory_bytes)
    return Placement(node, share, f"{_named(fit.gpus)} on {node}, {left} of its memory left")


def _gpu_part(wants: Resources, gpus: tuple[Device, ...]) -> float:
    if wants.share is not Share.MPS or not gpus:
        return 1.0
    if wants.sm_percent is not None:
        return wants.sm_percent / 100
    return (wants.vram_bytes or 0) / gpus[0].memory_bytes


def _named(gpus: tuple[Device, ...]) -> str:
    """As ``2 x NVIDIA H100``: several are of one model."""
    if not gpus:
        return "CPU"
    return gpus[0].kind if len(gpus) == 1 else f"{len(gpus)} x {gpus[0].kind}"
