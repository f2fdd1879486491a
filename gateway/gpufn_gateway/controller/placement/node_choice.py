"""The choice of a node: `place(requirements, nodes, leases, limits) -> Placement | NoRoom`. Pure.

1. Filter: a node that can start a process, or its container; a device for which the models have engines; a GPU of an
   acceptable kind, in the order of preference; host memory; cores.
2. Score: the shortest start, in seconds; a node whose cores are not oversubscribed, which is worth ten seconds; for a
   function without a GPU, a node without free GPUs; then the tightest fit, which leaves the largest hole for later
   workers.
3. A gang takes the best nodes of one GPU model, all or none.

Many workers are placed at a time, and each changes one node. A node's offer is the same for all requests that differ
in sizes and trust domains only. It is computed once, and cached in the lease book until the node's devices or leases
change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceShare, Health, Share
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.units import format_bytes
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.gpus import (
    GpuFit,
    Opening,
    Score,
    available_bytes,
    choose_share,
    choose_whole,
    domain_of,
    has_mps_for,
    openings,
    why_unavailable,
)
from gpufn_gateway.controller.placement.request import (
    Request,
    Requirements,
    cpu_pool,
    gpus_of,
    has_cores,
    why_no_gang,
)
from gpufn_gateway.controller.placement.shortage import Cause, Shortage, describe, describe_gang, shortage
from gpufn_gateway.controller.placement.start_time import StartTimes
from gpufn_gateway.controller.state.leases import GpuUse, LeaseBook, NodeUse

_OVERSUBSCRIBED_S: Final = 10  # a worker on oversubscribed cores slows all workers of its node down


class Placement(msgspec.Struct, frozen=True):
    """The place of a worker. `others` are the places of a gang's ranks above 0, each on its own node."""

    node: str
    share: DeviceShare
    why: str
    others: tuple[Placement, ...] = ()

    @property
    def by_rank(self) -> tuple[Placement, ...]:
        return (self, *self.others)


class NoRoom(msgspec.Struct, frozen=True):
    """`at_any_size`: there is no room for any request that differs in sizes and trust domains only."""

    at_any_size: bool = False


class _Offer(msgspec.Struct, frozen=True):
    """The rest of a node for requests with the same `offer_key`: parts of GPUs (`openings`), or the best choice of
    GPUs, or of none, for all of them (`fit`). Without `pool` there is no room for any of them."""

    report: NodeReport
    used: NodeUse
    pool: Device | None = None
    available_bytes: int = 0
    available_cores: float = 0.0
    idle_cores: float = 0.0  # promised to no worker
    openings: tuple[Opening, ...] | None = None
    fit: GpuFit | None = None

    @property
    def is_empty(self) -> bool:
        return self.pool is None or not (self.fit or self.openings)


class _Fit(msgspec.Struct, frozen=True):
    """A possible place; the lowest score wins. `start_s` is the expected time of the start."""

    score: Score
    offer: _Offer
    gpus: tuple[Device, ...]
    start_s: int


def place(
    requirements: Requirements,
    nodes: Sequence[NodeReport],
    leases: LeaseBook,
    limits: Limits,
    *,
    starts: StartTimes | None = None,
    best: bool = True,
) -> Placement | NoRoom:
    """Return the best place. Without `best`, return the first place found. `starts` are None if they are unknown."""
    count, at_any_size = requirements.resources.nodes, True
    for kind in requirements.resources.gpu or (None,):
        request = requirements.request(kind)
        fits: list[_Fit] = []
        possible = 0
        offers = leases.cache((request.offer_key, limits))
        for report in nodes:
            if count > 1 and why_no_gang(report):
                continue
            offer, used = offers.get(report.node), leases.used(report.node)
            if offer is None or offer.report is not report or offer.used is not used:
                offer = offers[report.node] = _offer(request, report, used, limits)
            if offer.is_empty:
                continue
            possible += 1
            fit = _fit(request, offer, starts)
            if fit is not None:
                fits.append(fit)
                if not best and count == 1:
                    break
        at_any_size = at_any_size and possible < count
        if chosen := _choose(fits, count):
            first, *others = (_placement(request, fit) for fit in chosen)
            return msgspec.structs.replace(first, others=tuple(others))
    return NoRoom(at_any_size)


def explain(
    requirements: Requirements,
    nodes: Sequence[NodeReport],
    leases: LeaseBook,
    limits: Limits,
    *,
    at_any_size: bool,
    drained: Sequence[NodeReport] = (),
) -> str:
    """Return why `place` found no room; this takes longer than finding out that there is none. `drained` are nodes
    beside `nodes`, which accept no workers.

    Of several kinds of GPU, the first is explained: the user prefers it."""
    first = requirements.request(next(iter(requirements.resources.gpu), None))
    is_gang = first.resources.nodes > 1
    fitting = _nodes_with_room(requirements, nodes, leases, limits) if is_gang else []
    shortages = {
        report.node: shortage(first, report, leases.used(report.node), limits, at_any_size=at_any_size and not is_gang)
        for report in nodes
        if report.node not in fitting
    }
    for report in drained:
        would_fit = bool(_nodes_with_room(requirements, [report], LeaseBook(), limits))
        unable = shortage(first, report, leases.used(report.node), limits)
        shortages[report.node] = Shortage(Cause.DRAINED) if would_fit else unable
    return describe_gang(first, fitting, shortages) if is_gang else describe(first, shortages)


def _nodes_with_room(
    requirements: Requirements, nodes: Sequence[NodeReport], leases: LeaseBook, limits: Limits
) -> list[str]:
    """Return the nodes that have room for one rank of a gang, or for one worker."""
    is_gang = requirements.resources.nodes > 1
    one = msgspec.structs.replace(requirements, resources=msgspec.structs.replace(requirements.resources, nodes=1))
    return [
        report.node
        for report in nodes
        if not (is_gang and why_no_gang(report))
        and isinstance(place(one, [report], leases, limits, best=False), Placement)
    ]


def can_resume(resources: Resources, share: DeviceShare, report: NodeReport, used: NodeUse, limits: Limits) -> bool:
    """Return whether a parked worker can have its share again. `used` is the use of its node by other workers."""
    pool = cpu_pool(report)
    gpus = [gpu for gpu in gpus_of(report) if gpu.uuid in share.gpus]
    if pool is None or len(gpus) < len(share.gpus):
        return False
    available_cores = pool.cores * limits.cpu_oversubscription - used.cores
    if pool.memory_bytes - used.memory_bytes < share.memory_bytes or not has_cores(available_cores, share.cores):
        return False
    return all(_can_resume_on(gpu, resources, share, used.gpus.get(gpu.uuid), limits) for gpu in gpus)


def _can_resume_on(gpu: Device, resources: Resources, share: DeviceShare, use: GpuUse | None, limits: Limits) -> bool:
    if why_unavailable(resources, gpu, use, limits, contained=share.contained) is not None:
        return False
    if share.mode is Share.EXCLUSIVE:
        return True  # no worker runs on it; a new worker does not check the memory of parked ones either
    return domain_of(use, limits) in (None, share.trust_domain) and available_bytes(gpu, use) >= share.vram_bytes


def _offer(request: Request, report: NodeReport, used: NodeUse, limits: Limits) -> _Offer:
    pool = cpu_pool(report)
    if pool is None or pool.health is not Health.HEALTHY:
        return _Offer(report, used)
    if not request.can_run_on(report) or not has_mps_for(request.resources, report):
        return _Offer(report, used)
    available_memory = pool.memory_bytes - used.memory_bytes
    available_cores = pool.cores * limits.cpu_oversubscription - used.cores
    idle_cores = pool.cores - used.cores
    if request.kind is None:
        whole_ones = sum(device.uuid not in used.gpus for device in gpus_of(report))
        return _Offer(report, used, pool, available_memory, available_cores, idle_cores, fit=GpuFit((), (whole_ones,)))
    gpus, contained = request.gpus(report), request.is_contained(report)
    resources = request.resources
    if resources.share is not Share.EXCLUSIVE:
        parts = openings(resources, gpus, used, limits, contained=contained)
        return _Offer(report, used, pool, available_memory, available_cores, idle_cores, openings=parts)
    free = [
        gpu
        for gpu in gpus
        if why_unavailable(resources, gpu, used.gpus.get(gpu.uuid), limits, contained=contained) is None
    ]
    unused = [gpu for gpu in free if gpu.uuid not in used.gpus]  # no parked worker wants to resume on these
    count, links = resources.gpu_count, report.links
    fit = choose_whole(unused, count, links) or choose_whole(free, count, links)
    return _Offer(report, used, pool, available_memory, available_cores, idle_cores, fit=fit)


def _fit(request: Request, offer: _Offer, starts: StartTimes | None) -> _Fit | None:
    pool, resources = offer.pool, request.resources
    available_memory = offer.available_bytes - request.memory_bytes
    if pool is None or available_memory < 0 or resources.cpu > pool.cores:
        return None
    fit = offer.fit if offer.openings is None else choose_share(offer.openings, resources, request.domain)
    if fit is None or not has_cores(offer.available_cores, resources.cpu):
        return None
    start_s = 0 if starts is None else starts.on(offer.report.node)
    is_oversubscribed = not has_cores(offer.idle_cores, resources.cpu)
    cost_s = start_s + _OVERSUBSCRIBED_S * is_oversubscribed
    score = (cost_s, *fit.score, available_memory, offer.available_cores - resources.cpu)
    return _Fit(score, offer, fit.gpus, start_s)


def _choose(fits: Sequence[_Fit], count: int) -> list[_Fit]:
    """Return the best `count` fits with GPUs of one model, the best first; empty if there are fewer."""
    by_model: dict[str, list[_Fit]] = {}
    for fit in sorted(fits, key=_rank):
        by_model.setdefault(fit.gpus[0].kind if fit.gpus and count > 1 else "", []).append(fit)
    enough = [of_model[:count] for of_model in by_model.values() if len(of_model) >= count]
    return min(enough, key=lambda chosen: [_rank(fit) for fit in chosen], default=[])


def _rank(fit: _Fit) -> tuple[Score, str]:
    return fit.score, fit.offer.report.node


def _placement(request: Request, fit: _Fit) -> Placement:
    resources, pool, node = request.resources, fit.offer.pool, fit.offer.report.node
    assert pool is not None
    share = DeviceShare(
        cpu_device=pool.uuid,
        cores=resources.cpu,
        memory_bytes=request.memory_bytes,
        gpus=tuple(gpu.uuid for gpu in fit.gpus),
        mode=resources.share if fit.gpus else Share.EXCLUSIVE,
        vram_bytes=resources.vram_bytes or 0,
        sm_percent=resources.sm_percent or 100,
        trust_domain=request.domain,
        contained=request.is_contained(fit.offer.report),
        gpu_part=_gpu_part(resources, fit.gpus),
    )
    free = format_bytes(fit.offer.available_bytes - request.memory_bytes)
    start = f", starts in about {fit.start_s} s" if fit.start_s else ""
    return Placement(node, share, f"{_gpu_names(fit.gpus)} on {node}, {free} of memory left{start}")


def _gpu_part(wants: Resources, gpus: tuple[Device, ...]) -> float:
    if wants.share is not Share.MPS or not gpus:
        return 1.0
    if wants.sm_percent is not None:
        return wants.sm_percent / 100
    return (wants.vram_bytes or 0) / gpus[0].memory_bytes


def _gpu_names(gpus: tuple[Device, ...]) -> str:
    """Return the GPUs in words, as ``2 x NVIDIA H100``: several are of one model."""
    if not gpus:
        return "CPU"
    return gpus[0].kind if len(gpus) == 1 else f"{len(gpus)} x {gpus[0].kind}"
