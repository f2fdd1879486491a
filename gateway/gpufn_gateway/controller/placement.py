"""Where a worker can run: `place(resources, nodes, leases) -> Placement | NoRoom`.

1. Filter: a device that the models have engines for; a GPU of an acceptable kind, in the order of preference; host
   memory; cores.
2. Score: a node whose cores are not oversubscribed; for a function without a GPU, a node without free ones; then the
   tightest fit, which leaves the largest hole for what comes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gpufn.device import Device, DeviceShare, DeviceType
from gpufn.engine import CPU_KIND
from gpufn.protocol.messages import NodeReport
from gpufn.spec import Resources, Share

from .leases import LeaseBook, Used

UNSTATED_MEMORY_BYTES = 128 << 20  # reserved for a function that does not say what it needs
ANY_KIND = "any"
_GIB = 1 << 30
_ROUNDING = 1e-9  # ten shares of 0.1 core are one core


class Limits(msgspec.Struct, frozen=True):
    """CPU time is compressible and memory is not: cores may be promised `cpu_oversubscription` times over."""

    cpu_oversubscription: float = 8.0
    time_shares_per_gpu: int = 8
    starts_per_node: int = 16


class Placement(msgspec.Struct, frozen=True):
    node: str
    share: DeviceShare
    why: str


class NoRoom(msgspec.Struct, frozen=True):
    """What was missing, per node."""

    missing: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if not self.missing:
            return "no node is up"
        return "; ".join(f"{node}: {text}" for node, text in self.missing)


class _Fit(msgspec.Struct, frozen=True):
    node: str
    share: DeviceShare
    why: str
    score: tuple[float, ...]


def place(
    resources: Resources,
    nodes: Sequence[NodeReport],
    leases: LeaseBook,
    limits: Limits | None = None,
    *,
    engine_kinds: frozenset[str] | None = None,
) -> Placement | NoRoom:
    """`engine_kinds`: the DeviceKinds that there are engines for; None for a function without models."""
    limits = limits or Limits()
    missing: dict[str, str] = {}
    for kind in resources.gpu or (None,):
        fits: list[_Fit] = []
        for report in nodes:
            offered = report if engine_kinds is None else _with_engines(report, kind, engine_kinds)
            used = leases.used(report.node)
            fit = offered if isinstance(offered, str) else _fit(resources, kind, offered, used, limits)
            if isinstance(fit, str):
                # The first kind's shortage is told: it is the one that the user would rather have.
                missing.setdefault(report.node, fit)
            else:
                fits.append(fit)
        if fits:
            best = min(fits, key=lambda fit: (fit.score, fit.node))
            return Placement(best.node, best.share, best.why)
    return NoRoom(tuple(sorted(missing.items())))


def has_kind(device: Device, wanted: str) -> bool:
    """Whether `wanted`, as in ``gpu="L4"``, names this device: "L4" is in "NVIDIA L4", and "any" is every GPU."""
    return wanted.lower() == ANY_KIND or wanted.lower() in device.kind.lower()


def _with_engines(report: NodeReport, kind: str | None, engine_kinds: frozenset[str]) -> NodeReport | str:
    """The node without the GPUs that there is no engine for; or which those are, when no other will do."""
    if kind is None:
        return report if CPU_KIND in engine_kinds else "there is no engine for the CPU"
    gpus = [device for device in report.devices if device.type is DeviceType.GPU]
    acceptable = {device.kind for device in gpus if has_kind(device, kind)}
    if acceptable and not acceptable & engine_kinds:
        return f"there is no engine for {' or '.join(sorted(acceptable))}: deploy again to have one built"
    without = [device for device in gpus if device.kind not in engine_kinds]
    return msgspec.structs.replace(report, devices=tuple(each for each in report.devices if each not in without))


def _fit(resources: Resources, kind: str | None, report: NodeReport, used: Used, limits: Limits) -> _Fit | str:
    pool = next((device for device in report.devices if device.type is DeviceType.CPU), None)
    if pool is None:
        return "it offers no CPU"
    memory_bytes = resources.memory_bytes or UNSTATED_MEMORY_BYTES
    left_bytes = pool.memory_bytes - used.memory_bytes - memory_bytes
    left_cores = pool.cores * limits.cpu_oversubscription - used.cores - resources.cpu
    if resources.cpu > pool.cores:
        return f"needs {resources.cpu:g} cores, it has {pool.cores:g}"
    if left_bytes < 0:
        return f"needs {_size(memory_bytes)} of memory, {_size(left_bytes + memory_bytes)} are free"
    if left_cores < -_ROUNDING:
        return f"needs {resources.cpu:g} cores, {max(0.0, left_cores + resources.cpu):.3g} are free"
    gpu = None
    gpu_score = 0.0
    if kind is not None:
        found = _gpu(resources.share, kind, report.devices, used, limits)
        if isinstance(found, str):
            return found
        gpu, gpu_score = found
    else:
        gpu_score = sum(device.type is DeviceType.GPU and device.uuid not in used.gpus for device in report.devices)
    is_oversubscribed = used.cores + resources.cpu > pool.cores + _ROUNDING
    return _Fit(
        report.node,
        DeviceShare(
            cpu_device=pool.uuid,
            cores=resources.cpu,
            memory_bytes=memory_bytes,
            gpu_device=gpu.uuid if gpu else None,
            exclusive=gpu is not None and resources.share is Share.EXCLUSIVE,
        ),
        f"{gpu.kind if gpu else 'CPU'} on {report.node}, {_size(left_bytes)} of its memory left",
        (is_oversubscribed, gpu_score, left_bytes, left_cores),
    )


def _gpu(share: Share, kind: str, devices: Iterable[Device], used: Used, limits: Limits) -> tuple[Device, float] | str:
    """The GPU to take and its score, lower is better: the smallest that does, the fullest that may be shared."""
    of_kind = [device for device in devices if device.type is DeviceType.GPU and has_kind(device, kind)]
    if not of_kind:
        return "it has no GPU" if kind.lower() == ANY_KIND else f"it has no {kind} GPU"
    free: list[tuple[float, str, Device]] = []
    for device in of_kind:
        count, is_exclusive = used.gpus.get(device.uuid, (0, False))
        if is_exclusive or (share is Share.EXCLUSIVE and count) or count >= limits.time_shares_per_gpu:
            continue
        free.append((device.memory_bytes / _GIB - 1000.0 * bool(count), device.uuid, device))
    if not free:
        named = "" if kind.lower() == ANY_KIND else f" {kind}"
        return f"its{named} GPU is in use" if len(of_kind) == 1 else f"its {len(of_kind)}{named} GPUs are in use"
    score, _, device = min(free, key=lambda entry: entry[:2])
    return device, score


def _size(count: int) -> str:
    if count < 0:
        return "0 MiB"
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / (1 << 20):.0f} MiB"
