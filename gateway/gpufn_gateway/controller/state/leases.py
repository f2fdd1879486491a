"""Which share of which node belongs to which worker, derived from the Assignments.

A lease exists as long as its Assignment does: it outlives the worker's process, never the other way round. That of a
parked worker is what it still holds: memory of the host, and the rest on its GPUs, which stay in its mode.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import msgspec

from gpufn_core.domain.device import DeviceShare, Share
from gpufn_core.domain.worker import ParkedMemory


class Lease(msgspec.Struct, frozen=True):
    worker: str
    node: str
    share: DeviceShare
    parked: ParkedMemory | None = None


class GpuUse(msgspec.Struct, frozen=True):
    """What is leased of one GPU. `sm_percent` is the sum of the ceilings, which may be more than 100. `workers` are
    those that run there, `parked` those that are to come back."""

    mode: Share
    trust_domain: str = ""
    workers: int = 1
    vram_bytes: int = 0
    sm_percent: int = 0
    contained: bool = False
    parked: int = 0


class Used(msgspec.Struct, frozen=True):
    """What is leased of one node. `gpus` has those that anybody holds a lease on."""

    cores: float = 0.0
    memory_bytes: int = 0
    gpus: dict[str, GpuUse] = {}


_UNUSED = Used()
_MOST_NOTES = 256  # kinds of request; a fleet has a few


class LeaseBook:
    """
    >>> book = LeaseBook()
    >>> book.grant("w-1", "a", DeviceShare(cpu_device="cpu", cores=0.5, memory_bytes=1024))
    >>> book.used("a")
    Used(cores=0.5, memory_bytes=1024, gpus={})
    """

    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        self._leases: dict[str, Lease] = {}
        self._of_node: dict[str, dict[str, Lease]] = {}
        self._used: dict[str, Used] = {}
        self._notes: dict[Hashable, dict[str, Any]] = {}
        for lease in leases:
            self.grant(lease.worker, lease.node, lease.share)

    def __repr__(self) -> str:
        return f"<LeaseBook [{len(self._leases)} leases on {len(self._of_node)} nodes]>"

    def __contains__(self, worker: str) -> bool:
        return worker in self._leases

    def grant(self, worker: str, node: str, share: DeviceShare, parked: ParkedMemory | None = None) -> None:
        """Granting again replaces."""
        self.release(worker)
        lease = Lease(worker, node, share, parked)
        self._leases[worker] = lease
        self._of_node.setdefault(node, {})[worker] = lease
        self._has_changed(node)

    def release(self, worker: str) -> None:
        """Absent is fine."""
        lease = self._leases.pop(worker, None)
        if lease is None:
            return
        leases = self._of_node[lease.node]
        del leases[worker]
        if not leases:
            del self._of_node[lease.node]
        self._has_changed(lease.node)

    def used(self, node: str) -> Used:
        found = self._used.get(node)
        if found is None:
            leases = self._of_node.get(node)
            found = self._used[node] = _sum(leases.values()) if leases else _UNUSED
        return found

    def notes(self, about: Hashable) -> dict[str, Any]:
        """By node, for values that follow from `used(node)` and are expensive to compute. Copies of a book share them:
        a value is valid for the very `Used` that it was computed from."""
        if about not in self._notes and len(self._notes) >= _MOST_NOTES:
            self._notes.clear()
        return self._notes.setdefault(about, {})

    def forget(self, node: str) -> None:
        """Drop the notes about a node that has gone."""
        for notes in self._notes.values():
            notes.pop(node, None)

    def _has_changed(self, node: str) -> None:
        self._used.pop(node, None)

    def copy(self) -> LeaseBook:
        """One to try things in."""
        for node in self._of_node:
            self.used(node)  # or each copy would compute a `Used` of its own, and no note would be valid for it
        twin = LeaseBook()
        twin._leases = dict(self._leases)
        twin._of_node = {node: dict(leases) for node, leases in self._of_node.items()}
        twin._used = dict(self._used)
        twin._notes = self._notes
        return twin


def _sum(leases: Iterable[Lease]) -> Used:
    cores, memory_bytes = 0.0, 0
    gpus: dict[str, GpuUse] = {}
    for lease in leases:
        share, parked = lease.share, lease.parked
        cores += share.cores if parked is None else 0.0
        memory_bytes += share.memory_bytes + (parked.host_bytes if parked is not None else 0)
        for uuid in share.gpus:
            use = _of(lease)
            gpus[uuid] = _both(gpus[uuid], use) if uuid in gpus else use
    return Used(cores, memory_bytes, gpus)


def _of(lease: Lease) -> GpuUse:
    """What one worker has of each of its GPUs."""
    share, parked = lease.share, lease.parked
    if parked is not None:
        return GpuUse(share.mode, share.trust_domain, 0, parked.device_bytes, 0, share.contained, parked=1)
    sm_percent = share.sm_percent if share.sm_percent < 100 else 0
    return GpuUse(share.mode, share.trust_domain, 1, share.vram_bytes, sm_percent, share.contained)


def _both(a: GpuUse, b: GpuUse) -> GpuUse:
    return GpuUse(
        # Two modes on one GPU cannot be; should they, nobody else comes in.
        a.mode if a.mode is b.mode else Share.EXCLUSIVE,
        a.trust_domain,
        a.workers + b.workers,
        a.vram_bytes + b.vram_bytes,
        a.sm_percent + b.sm_percent,
        a.contained,
        a.parked + b.parked,
    )
