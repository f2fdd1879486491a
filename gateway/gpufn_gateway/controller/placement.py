"""Where a worker can run: `place(resources, nodes, leases) -> Placement | NoRoom`.

1. Filter: a device that the models have engines for; a GPU of an acceptable kind, in the order of preference; host
   memory; cores.
2. Score: a node whose cores are not oversubscribed; for a function without a GPU, a node without free ones; then the
   tightest fit, which leaves the largest hole for what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpufn.device import DeviceShare, DeviceType, Share
from gpufn.engine import CPU_KIND
from gpufn.protocol.messages import NodeReport
from gpufn.spec import Resources

from .gpus import GpuFit, choose, has_kind, size
from .leases import LeaseBook, Used
from .limits import Limits

UNSTATED_MEMORY_BYTES = 128 << 20  # reserved for a function that does not say what it needs
_ROUNDING = 1e-9  # ten shares of 0.1 core are one core


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
        question = resources, kind, limits, engine_kinds
        for report in nodes:
            # Many workers of one function are placed at a time, and each changes one node.
            notes = leases.notes(report.node)
            asked_of, fit = notes.get(question, (None, ""))
            if asked_of is not report:
                offered = report if engine_kinds is None else _with_engines(report, kind, engine_kinds)
                used = leases.used(report.node)
                fit = offered if isinstance(offered, str) else _fit(resources, kind, offered, used, limits)
                notes[question] = report, fit
            if isinstance(fit, str):
                # The first kind's shortage is told: it is the one that the user would rather have.
                missing.setdefault(report.node, fit)
            else:
                fits.append(fit)
        if fits:
            best = min(fits, key=lambda fit: (fit.score, fit.node))
            return Placement(best.node, best.share, best.why)
    return NoRoom(tuple(sorted(missing.items())))


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
        return f"needs {size(memory_bytes)} of memory, {size(left_bytes + memory_bytes)} are free"
    if left_cores < -_ROUNDING:
        return f"needs {resources.cpu:g} cores, {max(0.0, left_cores + resources.cpu):.3g} are free"
    if kind is not None:
        found = choose(resources, kind, report, used, limits)
        if isinstance(found, str):
            return found
        fit = found
    else:
        free = sum(device.type is DeviceType.GPU and device.uuid not in used.gpus for device in report.devices)
        fit = GpuFit((), (free,))
    is_oversubscribed = used.cores + resources.cpu > pool.cores + _ROUNDING
    return _Fit(
        report.node,
        DeviceShare(
            cpu_device=pool.uuid,
            cores=resources.cpu,
            memory_bytes=memory_bytes,
            gpus=tuple(gpu.uuid for gpu in fit.gpus),
            mode=resources.share if fit.gpus else Share.EXCLUSIVE,
            vram_bytes=resources.vram_bytes or 0,
            sm_percent=resources.sm_percent or 100,
            trust_domain=resources.trust_domain,
        ),
        f"{_named(fit)} on {report.node}, {size(left_bytes)} of its memory left",
        (is_oversubscribed, *fit.score, left_bytes, left_cores),
    )


def _named(fit: GpuFit) -> str:
    """As ``2 x NVIDIA H100``: several are of one model."""
    if not fit.gpus:
        return "CPU"
    count = len(fit.gpus)
    return fit.gpus[0].kind if count == 1 else f"{count} x {fit.gpus[0].kind}"
