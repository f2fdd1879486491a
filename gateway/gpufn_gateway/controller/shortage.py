"""What a node lacks for a worker, in words, as `gpufn why` tells them. Pure; looked for only when no node will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpufn.device import Device, Health
from gpufn.engine import CPU_KIND
from gpufn.protocol.reports import NodeReport

from .gpus import ANY_KIND, Lack, domain_of, has_mps_for, lack, left_bytes, named_by
from .leases import GpuUse, Used
from .limits import Limits
from .request import Request, cpu_pool, gpus_of

_WORDS: Final[dict[Lack, tuple[str, str]]] = {  # of one GPU, and of several; `{}` is said of the largest
    Lack.SICK: ("is {}", "are {}"),
    Lack.IN_USE: ("is in use", "are in use"),
    Lack.SHARED_BY: ("is shared by {}", "are shared by {}"),
    Lack.CONTAINED: ("is shared by workers in containers", "are shared by workers in containers"),
    Lack.NOT_CONTAINED: ("is shared by workers out of containers", "are shared by workers out of containers"),
    Lack.DOMAIN: ("is shared within another trust domain", "are shared within other trust domains"),
    Lack.FULL: ("is shared by as many as can be", "are shared by as many as can be"),
    Lack.MEMORY: ("has too little memory: {}", "have too little memory: {}"),
    Lack.PARKED: ("has parked workers on it", "have parked workers on them"),
    Lack.INSTANCE: (
        "is a MIG instance, which has no shares by mps",
        "are MIG instances, which have no shares by mps",
    ),
}


def shortage(  # noqa: PLR0911 - one line per reason
    request: Request, report: NodeReport, used: Used, limits: Limits
) -> str:
    """Of a node that has no room for it."""
    pool = cpu_pool(report)
    if request.is_contained(report) and report.container_trouble:
        return f"it starts no containers: {report.container_trouble}"
    if (text := _without_engine(request, report)) is not None:
        return text
    if pool is None:
        return "it offers no CPU"
    if pool.health is not Health.HEALTHY:
        return f"it starts no workers: {pool.health_reason}"
    resources = request.resources
    left_memory = pool.memory_bytes - used.memory_bytes
    left_cores = pool.cores * limits.cpu_oversubscription - used.cores
    if resources.cpu > pool.cores:
        return f"needs {resources.cpu:g} cores, it has {pool.cores:g}"
    if left_memory < request.memory_bytes:
        return f"needs {size(request.memory_bytes)} of memory, {size(left_memory)} are free"
    if request.kind is None or not request.fits_cores(left_cores):
        return f"needs {resources.cpu:g} cores, {max(0.0, left_cores):.3g} are free"
    return _of_gpus(request, request.kind, report, used, limits)


def _without_engine(request: Request, report: NodeReport) -> str | None:
    kinds = request.engine_kinds
    if kinds is None:
        return None
    if request.kind is None:
        return None if CPU_KIND in kinds else "there is no engine for the CPU"
    there = {device.kind for device in named_by(request.resources, request.kind, gpus_of(report))}
    if not there or there & kinds:
        return None
    return f"there is no engine for {' or '.join(sorted(there))}: deploy again to have one built"


def _of_gpus(request: Request, kind: str, report: NodeReport, used: Used, limits: Limits) -> str:
    resources = request.resources
    named = "" if kind.lower() == ANY_KIND else f" {kind}"
    gpus = request.gpus(report)
    if not gpus:
        return f"it has no{named} GPU"
    if not has_mps_for(resources, report):
        return "it has no MPS: nvidia-cuda-mps-control is not there"
    lacks: dict[Lack, list[tuple[str, Device]]] = {}
    for device in gpus:
        use = used.gpus.get(device.uuid)
        reason = lack(resources, device, use, limits, contained=request.is_contained(report))
        if reason is None and domain_of(use, limits) not in (None, resources.trust_domain):
            reason = Lack.DOMAIN
        if reason is None and left_bytes(device, use) < (resources.vram_bytes or 0):
            reason = Lack.MEMORY
        if reason is not None:
            lacks.setdefault(reason, []).append((_detail(request, reason, device, use), device))
    free = len(gpus) - sum(map(len, lacks.values()))
    return _told(named, resources.gpu_count, free, {reason: lacks[reason] for reason in _WORDS if reason in lacks})


def _detail(request: Request, reason: Lack, device: Device, use: GpuUse | None) -> str:
    if reason is Lack.SICK:
        return f"{device.health.value} ({device.health_reason})" if device.health_reason else device.health.value
    if reason is Lack.SHARED_BY and use is not None:
        return use.mode.value
    if reason is Lack.MEMORY:
        return f"{size(request.resources.vram_bytes or 0)} are needed, {size(left_bytes(device, use))} are free"
    return ""


def _told(named: str, count: int, free: int, lacks: dict[Lack, list[tuple[str, Device]]]) -> str:
    """As ``of its 3 L4 GPUs 2 are in use and 1 is degraded (it is hot)``."""
    total = free + sum(map(len, lacks.values()))
    if total < count:
        return f"needs {count}{named} GPUs, it has {total}"
    if count > 1:
        lead = f"needs {count}{named} GPUs of one model, {free} of its {total} can be had"
        return f"{lead}: {_listed(lacks)}" if lacks else lead
    if len(lacks) == 1:
        ((reason, found),) = lacks.items()
        subject = f"its{named} GPU" if total == 1 else f"its {total}{named} GPUs"
        return f"{subject} {_phrase(reason, found)}"
    return f"of its {total}{named} GPUs {_listed(lacks)}"


def _listed(lacks: dict[Lack, list[tuple[str, Device]]]) -> str:
    return ", ".join(f"{len(found)} {_phrase(reason, found)}" for reason, found in lacks.items())


def _phrase(reason: Lack, found: Sequence[tuple[str, Device]]) -> str:
    """The words of the largest device stand for the group: where that has too little, all have."""
    singular, plural = _WORDS[reason]
    text = max(found, key=lambda each: (each[1].memory_bytes, each[0]))[0]
    return (singular if len(found) == 1 else plural).format(text)


def size(count: int) -> str:
    if count < 0:
        return "0 MiB"
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
