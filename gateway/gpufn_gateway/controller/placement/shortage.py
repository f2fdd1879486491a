"""Why nodes have no room for a worker, in words, as `gpufn why` prints them. Pure; computed only when no node has room.

A fleet has thousands of nodes and a few causes: `shortage` finds the cause of one node, `describe` describes all nodes
of a cause together, with at most three names.
"""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

import msgspec

from gpufn_core.domain.devices.device import ANY_KIND, Device, Health
from gpufn_core.domain.devices.engine import CPU_KIND
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.units import format_bytes
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.gpus import (
    Unavailable,
    available_bytes,
    domain_of,
    has_mps_for,
    matching_gpus,
    why_unavailable,
)
from gpufn_gateway.controller.placement.request import Request, cpu_pool, gpus_of, has_cores, why_no_gang
from gpufn_gateway.controller.state.leases import GpuUse, NodeUse

_WORDS: Final[dict[Unavailable, tuple[str, str]]] = {  # for one GPU, and for several; `{}` describes the largest
    Unavailable.UNHEALTHY: ("is {}", "are {}"),
    Unavailable.IN_USE: ("is in use", "are in use"),
    Unavailable.SHARED_BY: ("is shared by {}", "are shared by {}"),
    Unavailable.CONTAINED: ("is shared by workers in containers", "are shared by workers in containers"),
    Unavailable.NOT_CONTAINED: ("is shared by workers outside containers", "are shared by workers outside containers"),
    Unavailable.DOMAIN: ("is shared within another trust domain", "are shared within other trust domains"),
    Unavailable.FULL: ("has the maximum number of workers", "have the maximum number of workers"),
    Unavailable.MEMORY: ("has too little memory: {}", "have too little memory: {}"),
    Unavailable.FOREIGN: (
        "is used by processes of others, which hold {}",
        "are used by processes of others, which hold {}",
    ),
    Unavailable.PARKED: ("has parked workers on it", "have parked workers on them"),
    Unavailable.INSTANCE: ("is a MIG instance, which has no MPS shares", "are MIG instances, which have no MPS shares"),
}
_MAX_NAMES: Final = 3  # nodes named per cause
_MAX_CAUSES: Final = 4  # causes described, those of most nodes first
_MAX_DETAIL: Final = 120  # characters of a node's own message
_LOOKS_PER_STEP: Final = 8_000  # nodes, some microseconds each: the gateway's calls wait in the meantime


class Cause(enum.Enum):
    """The texts describe one node, or several of one cause; then `{remaining}` is of the node with most left."""

    DRAINED = "{it} {be} drained"
    NO_GANG = "{it} cannot be a node of a gang: {detail}"
    NO_CONTAINERS = "{it} cannot start containers: {detail}"
    NO_ISOLATION = "{it} cannot isolate its workers: {detail}"
    NO_PACKAGES = "{it} cannot have the packages: {detail}"
    NO_GPU_CONTAINERS = "{its} containers cannot have GPUs: {detail}"
    NO_ENGINE = "there is no engine for {detail}: deploy again to have one built"
    NO_CPU_ENGINE = "there is no engine for the CPU"
    NO_CPU = "{it} {offers} no CPU"
    NO_STARTS = "{it} cannot start workers: {detail}"
    NO_GPU = "{it} {has} no{kind} GPU"
    NO_MPS = "{it} {has} no MPS: nvidia-cuda-mps-control is missing"
    CORES = "needs {cores:g} cores, {it} {has} {remaining:g}{at_most}"
    MEMORY = "needs {memory} of memory, {remaining_memory} are free{at_most}"
    FREE_CORES = "needs {cores:g} cores, {remaining:.3g} are free{at_most}"
    GPU_COUNT = "needs {gpu_count}{kind} GPUs, {it} {has} {remaining:g}{at_most}"
    GPUS = ""  # see `_describe_gpus`


class UnavailableGpu(msgspec.Struct, frozen=True):
    """A GPU that is not available. `text` completes the words of its Unavailable."""

    text: str
    device: Device


class Shortage(msgspec.Struct, frozen=True):
    """Why one node has no room. Nodes with the same `cause` and `detail` are described together. `remaining` is the
    rest of the resource; `unavailable` and `free` describe its GPUs."""

    cause: Cause
    detail: str = ""
    remaining: float = 0.0
    unavailable: Mapping[Unavailable, Sequence[UnavailableGpu]] = {}
    free: int = 0


def shortage(  # noqa: PLR0911, PLR0912 - one line per cause
    request: Request, report: NodeReport, used: NodeUse, limits: Limits, *, at_any_size: bool = False
) -> Shortage:
    """Return why a node has no room. `at_any_size`: it has none for requests that differ only in sizes either."""
    pool = cpu_pool(report)
    if request.resources.nodes > 1 and (no_gang := why_no_gang(report)):
        return Shortage(Cause.NO_GANG, no_gang)
    if request.is_contained(report) and report.container_trouble:
        return Shortage(Cause.NO_CONTAINERS, report.container_trouble)
    if report.isolation_trouble and (trouble := request.isolation_trouble(report)):
        return Shortage(Cause.NO_ISOLATION, trouble)
    if request.packages is not None and (trouble := request.package_trouble(report)):
        return Shortage(Cause.NO_PACKAGES, trouble)
    if request.kind is None and request.engine_kinds is not None and CPU_KIND not in request.engine_kinds:
        return Shortage(Cause.NO_CPU_ENGINE)
    if kinds := _kinds_without_engine(request, report):
        return Shortage(Cause.NO_ENGINE, kinds)
    if pool is None:
        return Shortage(Cause.NO_CPU)
    if pool.health is not Health.HEALTHY:
        return Shortage(Cause.NO_STARTS, pool.health_reason)
    # First the causes that no released lease would change.
    gpus = request.gpus(report)
    if request.kind is not None and not gpus:
        return Shortage(Cause.NO_GPU)
    if gpus and request.is_contained(report) and report.gpu_container_trouble:
        return Shortage(Cause.NO_GPU_CONTAINERS, report.gpu_container_trouble)
    resources = request.resources
    if request.kind is not None and not has_mps_for(resources, report):
        return Shortage(Cause.NO_MPS)
    if not at_any_size or request.kind is None:
        available_memory = pool.memory_bytes - used.memory_bytes
        available_cores = pool.cores * limits.cpu_oversubscription - used.cores
        if resources.cpu > pool.cores:
            return Shortage(Cause.CORES, remaining=pool.cores)
        if available_memory < request.memory_bytes:
            return Shortage(Cause.MEMORY, remaining=available_memory)
        if request.kind is None or not has_cores(available_cores, resources.cpu):
            return Shortage(Cause.FREE_CORES, remaining=max(0.0, available_cores))
    if len(gpus) < resources.gpu_count:
        return Shortage(Cause.GPU_COUNT, remaining=len(gpus))
    return _of_gpus(request, gpus, report, used, limits)


def _kinds_without_engine(request: Request, report: NodeReport) -> str:
    """Return the DeviceKinds of the node's GPUs if none of them has an engine."""
    if request.engine_kinds is None or request.kind is None:
        return ""
    present = {device.kind for device in matching_gpus(request.resources, request.kind, gpus_of(report))}
    return "" if present & request.engine_kinds else " or ".join(sorted(present))


def _of_gpus(request: Request, gpus: Sequence[Device], report: NodeReport, used: NodeUse, limits: Limits) -> Shortage:
    resources = request.resources
    contained = request.is_contained(report)
    unavailable: dict[Unavailable, list[UnavailableGpu]] = {}
    for device in gpus:
        use = used.gpus.get(device.uuid)
        reason = why_unavailable(resources, device, use, limits, contained=contained)
        if reason is None and domain_of(use, limits) not in (None, request.domain):
            reason = Unavailable.DOMAIN
        if reason is None and available_bytes(device, use) < (resources.vram_bytes or 0):
            reason = Unavailable.MEMORY
        if reason is not None:
            unavailable.setdefault(reason, []).append(UnavailableGpu(_detail(request, reason, device, use), device))
    return Shortage(Cause.GPUS, unavailable=unavailable, free=len(gpus) - sum(map(len, unavailable.values())))


def _detail(request: Request, reason: Unavailable, device: Device, use: GpuUse | None) -> str:
    if reason is Unavailable.UNHEALTHY:
        return f"{device.health.value} ({device.health_reason})" if device.health_reason else device.health.value
    if reason is Unavailable.SHARED_BY and use is not None:
        return use.mode.value
    if reason is Unavailable.FOREIGN:
        return format_bytes(device.foreign_bytes)
    if reason is Unavailable.MEMORY:
        needed = format_bytes(request.resources.vram_bytes or 0)
        foreign = f", processes of others hold {format_bytes(device.foreign_bytes)}" if device.foreign_bytes else ""
        return f"{needed} are needed, {format_bytes(available_bytes(device, use))} are free{foreign}"
    return ""


# --- words ---


def describe(request: Request, shortages: Mapping[str, Shortage]) -> str:
    """
    >>> from gpufn_core.spec.resources import Resources
    >>> b200 = Request(Resources(gpu=("B200",)), kind="B200")
    >>> describe(b200, {"a": Shortage(Cause.NO_GPU)})
    'a: it has no B200 GPU'
    >>> describe(b200, {f"node-{n:03}": Shortage(Cause.NO_GPU) for n in range(1000)})
    '1,000 nodes (node-000, node-001, node-002, ...): they have no B200 GPU'
    """
    if not shortages:
        return "no node is up"
    groups: dict[tuple[Cause, str], list[str]] = {}
    for node in sorted(shortages):
        shortage_ = shortages[node]
        groups.setdefault((shortage_.cause, shortage_.detail), []).append(node)
    most_first = sorted(groups.values(), key=lambda nodes: (-len(nodes), nodes[0]))
    texts = [
        f"{_names(nodes)}: {_describe(request, [shortages[node] for node in nodes])}"
        for nodes in most_first[:_MAX_CAUSES]
    ]
    if more := sum(map(len, most_first[_MAX_CAUSES:])):
        texts.append(f"{more:,} more node{'s' if more > 1 else ''}: for other reasons")
    return "; ".join(texts)


def describe_gang(request: Request, fitting: Sequence[str], shortages: Mapping[str, Shortage]) -> str:
    """Describe why a gang has no room, although `fitting` nodes each have room for one of its ranks.

    >>> from gpufn_core.spec.resources import Resources
    >>> gang = Request(Resources(gpu=("B200",), nodes=2), kind="B200")
    >>> describe_gang(gang, ["a"], {"b": Shortage(Cause.NO_GPU)})
    'needs 2 nodes at the same time, 1 has room (a); b: it has no B200 GPU'
    >>> describe_gang(gang, ["a"], {})
    'needs 2 nodes at the same time, and 1 is up'
    """
    wanted, up = request.resources.nodes, len(fitting) + len(shortages)
    needs = f"needs {wanted} nodes at the same time"
    if up < wanted:
        return f"{needs}, and {up} {'is' if up == 1 else 'are'} up"
    if len(fitting) >= wanted:
        return f"{needs} with GPUs of one model; those with room differ in their models: {_names(fitting)}"
    has_room = f"{len(fitting)} {'has' if len(fitting) == 1 else 'have'} room"
    named = f" ({', '.join(fitting[:_MAX_NAMES])}{', ...' if len(fitting) > _MAX_NAMES else ''})" if fitting else ""
    return f"{needs}, {has_room}{named}; {describe(request, shortages)}"


def _names(nodes: Sequence[str]) -> str:
    if len(nodes) == 1:
        return nodes[0]
    named = ", ".join(nodes[:_MAX_NAMES])
    return f"{len(nodes):,} nodes ({named}{', ...' if len(nodes) > _MAX_NAMES else ''})"


def _describe(request: Request, shortages: Sequence[Shortage]) -> str:
    """Describe nodes of one cause."""
    first, are_several = shortages[0], len(shortages) > 1
    if first.cause is Cause.GPUS:
        return _describe_gpus(request, shortages)
    it, its, has, offers, be = (
        ("they", "their", "have", "offer", "are") if are_several else ("it", "its", "has", "offers", "is")
    )
    remaining = max(each.remaining for each in shortages)
    text: str = first.cause.value
    return text.format(
        it=it,
        its=its,
        has=has,
        offers=offers,
        be=be,
        at_most=" at most" if are_several else "",
        kind=_kind(request),
        detail=_bounded(first.detail),
        cores=request.resources.cpu,
        memory=format_bytes(request.memory_bytes),
        gpu_count=request.resources.gpu_count,
        remaining=remaining,
        remaining_memory=format_bytes(remaining),
    )


def _describe_gpus(request: Request, shortages: Sequence[Shortage]) -> str:
    """Return a text such as ``of its 3 L4 GPUs 2 are in use, 1 is degraded (it is hot)``."""
    kind, count = _kind(request), request.resources.gpu_count
    unavailable = {
        reason: gpus
        for reason in _WORDS
        if (gpus := [each for one in shortages for each in one.unavailable.get(reason, ())])
    }
    free = sum(one.free for one in shortages)
    total = free + sum(map(len, unavailable.values()))
    its = "their" if len(shortages) > 1 else "its"
    if count > 1:
        lead = f"needs {count}{kind} GPUs of one model, {free} of {its} {total:,} are available"
        if len(shortages) > 1:
            most = max(one.free for one in shortages)
            lead = f"needs {count}{kind} GPUs of one model on one node, a node has {most} available at most"
        return f"{lead}: {_listed(unavailable)}" if unavailable else lead
    if len(unavailable) == 1 and not free:
        ((reason, gpus),) = unavailable.items()
        subject = f"its{kind} GPU" if total == 1 else f"{its} {total:,}{kind} GPUs"
        return f"{subject} {_phrase(reason, gpus)}"
    return f"of {its} {total:,}{kind} GPUs {_listed(unavailable)}"


def _kind(request: Request) -> str:
    return "" if request.kind is None or request.kind.lower() == ANY_KIND else f" {request.kind}"


def _listed(unavailable: Mapping[Unavailable, Sequence[UnavailableGpu]]) -> str:
    return ", ".join(f"{len(gpus):,} {_phrase(reason, gpus)}" for reason, gpus in unavailable.items())


def _phrase(reason: Unavailable, gpus: Sequence[UnavailableGpu]) -> str:
    """Describe the group by its largest device: if that has too little memory, all have."""
    singular, plural = _WORDS[reason]
    text = max(gpus, key=lambda each: (each.device.memory_bytes, each.text)).text
    return (singular if len(gpus) == 1 else plural).format(_bounded(text))


def _bounded(detail: str) -> str:
    return textwrap.shorten(detail, _MAX_DETAIL, placeholder=" ...")


# --- memory ---


class Shortages:
    """Explanations per kind of request, kept from step to step. A step looks at a bounded number of nodes: requests
    without an explanation come first, then the oldest explanations."""

    def __init__(self) -> None:
        self._texts: dict[Hashable, str] = {}  # the oldest first

    def explain(self, wanted: Mapping[Hashable, Callable[[], str]], nodes: int, *, renew: bool) -> dict[Hashable, str]:
        """Return the known texts for `wanted` and drop all others. `renew`: also refresh known texts."""
        texts = {key: text for key, text in self._texts.items() if key in wanted}
        due = [key for key in wanted if key not in texts]
        if renew:
            due += texts
        for key in due[: max(1, _LOOKS_PER_STEP // max(1, nodes))]:
            texts.pop(key, None)
            texts[key] = wanted[key]()
        self._texts = texts
        return texts
