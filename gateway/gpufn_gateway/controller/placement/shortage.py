"""Why nodes have no room for a worker, in words, as `gpufn why` prints them. Pure; computed only when no node has room.

A fleet has thousands of nodes and a few causes: `shortage` finds the cause of one node, `in_words` describes all nodes
of a cause together, with at most three names.
"""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

import msgspec

from gpufn_core.domain.device import Device, Health
from gpufn_core.domain.engine import CPU_KIND
from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.gpus import (
    ANY_KIND,
    Lack,
    domain_of,
    has_mps_for,
    lack,
    left_bytes,
    named_by,
)
from gpufn_gateway.controller.placement.request import Request, cpu_pool, gpus_of
from gpufn_gateway.controller.state.leases import GpuUse, Used

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
_NAMED: Final = 3  # nodes of one cause that are named
_CAUSES: Final = 4  # that are described, those of most nodes first
_DETAIL: Final = 120  # characters of a node's own words
_LOOKS_PER_STEP: Final = 8_000  # at nodes, some microseconds each: the gateway's calls wait meanwhile


class Cause(enum.Enum):
    NO_CONTAINERS = enum.auto()
    NO_ENGINE = enum.auto()
    NO_CPU = enum.auto()
    NO_STARTS = enum.auto()
    NO_GPU = enum.auto()
    NO_MPS = enum.auto()
    CORES = enum.auto()
    MEMORY = enum.auto()
    FREE_CORES = enum.auto()
    GPU_COUNT = enum.auto()
    GPUS = enum.auto()


class Found(msgspec.Struct, frozen=True):
    """A GPU that cannot be had. `text` completes the words of its Lack."""

    text: str
    device: Device


class Shortage(msgspec.Struct, frozen=True):
    """Why one node has no room. Nodes with the same `cause` and `detail` are described together; `left` is what such a
    node has of the resource, `lacks` and `free` are of its GPUs."""

    cause: Cause
    detail: str = ""
    left: float = 0.0
    lacks: Mapping[Lack, Sequence[Found]] = {}
    free: int = 0


def shortage(  # noqa: PLR0911 - one line per cause
    request: Request, report: NodeReport, used: Used, limits: Limits, *, of_any_size: bool = False
) -> Shortage:
    """Of a node that has no room for it; `of_any_size`: for no request that differs from it in its sizes only."""
    pool = cpu_pool(report)
    if request.is_contained(report) and report.container_trouble:
        return Shortage(Cause.NO_CONTAINERS, report.container_trouble)
    if (kinds := _without_engine(request, report)) is not None:
        return Shortage(Cause.NO_ENGINE, kinds)
    if pool is None:
        return Shortage(Cause.NO_CPU)
    if pool.health is not Health.HEALTHY:
        return Shortage(Cause.NO_STARTS, pool.health_reason)
    # First what no release of anything would change.
    gpus = request.gpus(report)
    if request.kind is not None and not gpus:
        return Shortage(Cause.NO_GPU)
    resources = request.resources
    if request.kind is not None and not has_mps_for(resources, report):
        return Shortage(Cause.NO_MPS)
    if not of_any_size or request.kind is None:
        left_memory = pool.memory_bytes - used.memory_bytes
        left_cores = pool.cores * limits.cpu_oversubscription - used.cores
        if resources.cpu > pool.cores:
            return Shortage(Cause.CORES, left=pool.cores)
        if left_memory < request.memory_bytes:
            return Shortage(Cause.MEMORY, left=left_memory)
        if request.kind is None or not request.fits_cores(left_cores):
            return Shortage(Cause.FREE_CORES, left=max(0.0, left_cores))
    if len(gpus) < resources.gpu_count:
        return Shortage(Cause.GPU_COUNT, left=len(gpus))
    return _of_gpus(request, gpus, report, used, limits)


def _without_engine(request: Request, report: NodeReport) -> str | None:
    """The DeviceKinds that the node has, none of which has an engine; None where that is not the cause."""
    kinds = request.engine_kinds
    if kinds is None:
        return None
    if request.kind is None:
        return None if CPU_KIND in kinds else ""
    there = {device.kind for device in named_by(request.resources, request.kind, gpus_of(report))}
    if not there or there & kinds:
        return None
    return " or ".join(sorted(there))


def _of_gpus(request: Request, gpus: Sequence[Device], report: NodeReport, used: Used, limits: Limits) -> Shortage:
    resources = request.resources
    contained = request.is_contained(report)
    lacks: dict[Lack, list[Found]] = {}
    for device in gpus:
        use = used.gpus.get(device.uuid)
        reason = lack(resources, device, use, limits, contained=contained)
        if reason is None and domain_of(use, limits) not in (None, resources.trust_domain):
            reason = Lack.DOMAIN
        if reason is None and left_bytes(device, use) < (resources.vram_bytes or 0):
            reason = Lack.MEMORY
        if reason is not None:
            lacks.setdefault(reason, []).append(Found(_detail(request, reason, device, use), device))
    return Shortage(Cause.GPUS, lacks=lacks, free=len(gpus) - sum(map(len, lacks.values())))


def _detail(request: Request, reason: Lack, device: Device, use: GpuUse | None) -> str:
    if reason is Lack.SICK:
        return f"{device.health.value} ({device.health_reason})" if device.health_reason else device.health.value
    if reason is Lack.SHARED_BY and use is not None:
        return use.mode.value
    if reason is Lack.MEMORY:
        return f"{size(request.resources.vram_bytes or 0)} are needed, {size(left_bytes(device, use))} are free"
    return ""


# --- words ---


def in_words(request: Request, shortages: Mapping[str, Shortage]) -> str:
    """
    >>> from gpufn_core.spec.resources import Resources
    >>> b200 = Request(Resources(gpu=("B200",)), "B200")
    >>> in_words(b200, {"a": Shortage(Cause.NO_GPU)})
    'a: it has no B200 GPU'
    >>> in_words(b200, {f"node-{n:03}": Shortage(Cause.NO_GPU) for n in range(1000)})
    '1,000 nodes (node-000, node-001, node-002, ...): they have no B200 GPU'
    """
    if not shortages:
        return "no node is up"
    groups: dict[tuple[Cause, str], list[str]] = {}
    for node in sorted(shortages):
        found = shortages[node]
        groups.setdefault((found.cause, found.detail), []).append(node)
    most_first = sorted(groups.values(), key=lambda nodes: (-len(nodes), nodes[0]))
    texts = [f"{_names(nodes)}: {_of(request, [shortages[node] for node in nodes])}" for nodes in most_first[:_CAUSES]]
    if more := sum(map(len, most_first[_CAUSES:])):
        texts.append(f"{more:,} more node{'s' if more > 1 else ''}: for other reasons")
    return "; ".join(texts)


def _names(nodes: Sequence[str]) -> str:
    if len(nodes) == 1:
        return nodes[0]
    named = ", ".join(nodes[:_NAMED])
    return f"{len(nodes):,} nodes ({named}{', ...' if len(nodes) > _NAMED else ''})"


def _of(request: Request, shortages: Sequence[Shortage]) -> str:  # noqa: PLR0911 - one line per cause
    """Nodes of one cause. Of several the one that has most left is described."""
    first, are_several = shortages[0], len(shortages) > 1
    detail = _bounded(first.detail)
    wants, named = request.resources, _named(request)
    left = max(each.left for each in shortages)
    it, has, starts = ("they", "have", "start") if are_several else ("it", "has", "starts")
    at_most = " at most" if are_several else ""
    match first.cause:
        case Cause.NO_CONTAINERS:
            return f"{it} {starts} no containers: {detail}"
        case Cause.NO_ENGINE if first.detail:
            return f"there is no engine for {detail}: deploy again to have one built"
        case Cause.NO_ENGINE:
            return "there is no engine for the CPU"
        case Cause.NO_CPU:
            return f"{it} {'offer' if are_several else 'offers'} no CPU"
        case Cause.NO_STARTS:
            return f"{it} {starts} no workers: {detail}"
        case Cause.NO_GPU:
            return f"{it} {has} no{named} GPU"
        case Cause.NO_MPS:
            return f"{it} {has} no MPS: nvidia-cuda-mps-control is not there"
        case Cause.CORES:
            return f"needs {wants.cpu:g} cores, {it} {has} {left:g}{at_most}"
        case Cause.MEMORY:
            return f"needs {size(request.memory_bytes)} of memory, {size(int(left))} are free{at_most}"
        case Cause.FREE_CORES:
            return f"needs {wants.cpu:g} cores, {left:.3g} are free{at_most}"
        case Cause.GPU_COUNT:
            return f"needs {wants.gpu_count}{named} GPUs, {it} {has} {left:g}{at_most}"
        case Cause.GPUS:
            return _of_their_gpus(request, shortages)


def _of_their_gpus(request: Request, shortages: Sequence[Shortage]) -> str:
    """As ``of its 3 L4 GPUs 2 are in use, 1 is degraded (it is hot)``."""
    named, count = _named(request), request.resources.gpu_count
    lacks = {
        reason: found
        for reason in _WORDS
        if (found := [each for one in shortages for each in one.lacks.get(reason, ())])
    }
    free = sum(one.free for one in shortages)
    total = free + sum(map(len, lacks.values()))
    its = "their" if len(shortages) > 1 else "its"
    if count > 1:
        lead = f"needs {count}{named} GPUs of one model, {free} of {its} {total:,} can be had"
        if len(shortages) > 1:
            most = max(one.free for one in shortages)
            lead = f"needs {count}{named} GPUs of one model on one node, {most} of one node's can be had at most"
        return f"{lead}: {_listed(lacks)}" if lacks else lead
    if len(lacks) == 1 and not free:
        ((reason, found),) = lacks.items()
        subject = f"its{named} GPU" if total == 1 else f"{its} {total:,}{named} GPUs"
        return f"{subject} {_phrase(reason, found)}"
    return f"of {its} {total:,}{named} GPUs {_listed(lacks)}"


def _named(request: Request) -> str:
    return "" if request.kind is None or request.kind.lower() == ANY_KIND else f" {request.kind}"


def _listed(lacks: Mapping[Lack, Sequence[Found]]) -> str:
    return ", ".join(f"{len(found):,} {_phrase(reason, found)}" for reason, found in lacks.items())


def _phrase(reason: Lack, found: Sequence[Found]) -> str:
    """The words of the largest device stand for the group: where that has too little, all have."""
    singular, plural = _WORDS[reason]
    text = max(found, key=lambda each: (each.device.memory_bytes, each.text)).text
    text = _bounded(text)
    return (singular if len(found) == 1 else plural).format(text)


def _bounded(detail: str) -> str:
    return textwrap.shorten(detail, _DETAIL, placeholder=" ...")


def size(count: int) -> str:
    if count < 0:
        return "0 MiB"
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


# --- memory ---


class Shortages:
    """What was found for each kind of request, from step to step. A step looks at a bounded number of nodes: requests
    that were never explained come first, then those that were explained longest ago."""

    def __init__(self) -> None:
        self._texts: dict[Hashable, str] = {}  # the oldest first

    def explain(self, wanted: Mapping[Hashable, Callable[[], str]], nodes: int, *, renew: bool) -> dict[Hashable, str]:
        """Texts of those in `wanted`, as far as they are known; the others are forgotten. `renew`: also look again."""
        texts = {key: text for key, text in self._texts.items() if key in wanted}
        due = [key for key in wanted if key not in texts]
        if renew:
            due += texts
        for key in due[: max(1, _LOOKS_PER_STEP // max(1, nodes))]:
            texts.pop(key, None)
            texts[key] = wanted[key]()
        self._texts = texts
        return texts
