"""Where a worker can run: `place(resources, nodes, leases) -> Placement | NoRoom`.

1. Filter: a device that the models have engines for; a GPU of an acceptable kind, in the order of preference; host
   memory; cores.
2. Score: a node whose cores are not oversubscribed; for a function without a GPU, a node without free ones; then the
   tightest fit, which leaves the largest hole for what comes next.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpufn.device import Device, DeviceShare, DeviceType, Share
from gpufn.engine import CPU_KIND
from gpufn.protocol.messages import NodeReport
from gpufn.spec import Resources

from .gpus import GpuFit, choose, has_kind, size
from .leases import LeaseBook, Used
from .limits import Limits

UNSTATED_MEMORY_BYTES = 128 << 20  # reserved for a function that does not say what it needs
_NOT_ASKED = None, ""
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


class _Offer(msgspec.Struct, frozen=True):
    """What of a node a kind names: `gpus` that there are engines for."""

    report: NodeReport
    pool: Device | None
    gpus: tuple[Device, ...]


class _Fit(msgspec.Struct, frozen=True):
    """Where it could be; the lowest score wins."""

    score: tuple[float, ...]
    node: str
    pool: Device
    gpus: tuple[Device, ...]
    left_bytes: int  # of the node's memory


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
        about, question = (kind, engine_kinds), (resources, kind, limits, engine_kinds)
        for report in nodes:
            # Many workers are placed at a time, and each changes one node.
            notes = leases.notes(report.node)
            asked_of, fit = notes.get(question, _NOT_ASKED)
            if asked_of is not report:
                offered_by, offer = notes.get(about, _NOT_ASKED)
                if offered_by is not report:
                    offer = _offer(report, kind, engine_kinds)
                    notes[about] = report, offer
                used = leases.used(report.node)
                fit = offer if isinstance(offer, str) else _fit(resources, kind, offer, used, limits)
                notes[question] = report, fit
            if isinstance(fit, str):
                # The first kind's shortage is told: it is the one that the user would rather have.
                missing.setdefault(report.node, fit)
            else:
                fits.append(fit)
        if fits:
            return _placement(resources, min(fits, key=lambda fit: (fit.score, fit.node)))
    return NoRoom(tuple(sorted(missing.items())))


def _offer(report: NodeReport, kind: str | None, engine_kinds: frozenset[str] | None) -> _Offer | str:
    """Without the GPUs that there is no engine for; or which those are, when no other will do."""
    pool = next((device for device in report.devices if device.type is DeviceType.CPU), None)
    gpus = tuple(device for device in report.devices if device.type is DeviceType.GPU)
    if kind is None:
        has_engine = engine_kinds is None or CPU_KIND in engine_kinds
        return _Offer(report, pool, gpus) if has_engine else "there is no engine for the CPU"
    gpus = tuple(device for device in gpus if has_kind(device, kind))
    if engine_kinds is not None and gpus:
        acceptable = {device.kind for device in gpus}
        if not acceptable & engine_kinds:
            return f"there is no engine for {' or '.join(sorted(acceptable))}: deploy again to have one built"
        gpus = tuple(device for device in gpus if device.kind in engine_kinds)
    return _Offer(report, pool, gpus)


def _fit(resources: Resources, kind: str | None, offer: _Offer, used: Used, limits: Limits) -> _Fit | str:
    pool = offer.pool
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
        found = choose(resources, kind, offer.gpus, report=offer.report, used=used, limits=limits)
        if isinstance(found, str):
            return found
        fit = found
    else:
        fit = GpuFit((), (sum(device.uuid not in used.gpus for device in offer.gpus),))
    is_oversubscribed = used.cores + resources.cpu > pool.cores + _ROUNDING
    return _Fit((is_oversubscribed, *fit.score, left_bytes, left_cores), offer.report.node, pool, fit.gpus, left_bytes)


def _placement(resources: Resources, fit: _Fit) -> Placement:
    share = DeviceShare(
        cpu_device=fit.pool.uuid,
        cores=resources.cpu,
        memory_bytes=resources.memory_bytes or UNSTATED_MEMORY_BYTES,
        gpus=tuple(gpu.uuid for gpu in fit.gpus),
        mode=resources.share if fit.gpus else Share.EXCLUSIVE,
        vram_bytes=resources.vram_bytes or 0,
        sm_percent=resources.sm_percent or 100,
        trust_domain=resources.trust_domain,
    )
    return Placement(fit.node, share, f"{_named(fit.gpus)} on {fit.node}, {size(fit.left_bytes)} of its memory left")


def _named(gpus: tuple[Device, ...]) -> str:
    """As ``2 x NVIDIA H100``: several are of one model."""
    if not gpus:
        return "CPU"
    return gpus[0].kind if len(gpus) == 1 else f"{len(gpus)} x {gpus[0].kind}"
