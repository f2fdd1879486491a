"""Leases: which share of which node belongs to which worker, derived from the Assignments.

A lease exists as long as its Assignment does. It outlives the worker's process, never the other way round. The lease of
a parked worker covers its remaining memory: on the host, and on its GPUs, which stay in its mode.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import msgspec

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_core.domain.worker import ParkedMemory


class Lease(msgspec.Struct, frozen=True):
    worker: str
    node: str
    share: DeviceShare
    parked: ParkedMemory | None = None


class GpuUse(msgspec.Struct, frozen=True):
    """Leased parts of one GPU. `sm_percent` is the sum of the ceilings, which may exceed 100. `workers` counts the
    workers that run there, `parked` the workers that may resume there."""

    mode: Share
    trust_domain: str = ""
    workers: int = 1
    vram_bytes: int = 0
    sm_percent: int = 0
    contained: bool = False
    parked: int = 0


class NodeUse(msgspec.Struct, frozen=True):
    """Leased parts of one node. `gpus` has only the GPUs with a lease."""

    cores: float = 0.0
    memory_bytes: int = 0
    gpus: dict[str, GpuUse] = {}


_NO_USE = NodeUse()
_MAX_CACHED_KINDS = 256  # kinds of request; a fleet has a few


class LeaseBook:
    """
    >>> book = LeaseBook()
    >>> book.grant("w-1", "a", DeviceShare(cpu_device="cpu", cores=0.5, memory_bytes=1024))
    >>> book.used("a")
    NodeUse(cores=0.5, memory_bytes=1024, gpus={})
    """

    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        self._leases: dict[str, Lease] = {}
        self._by_node: dict[str, dict[str, Lease]] = {}
        self._used: dict[str, NodeUse] = {}
        self._caches: dict[Hashable, dict[str, Any]] = {}
        for lease in leases:
            self.grant(lease.worker, lease.node, lease.share)

    def __repr__(self) -> str:
        return f"<LeaseBook [{len(self._leases)} leases on {len(self._by_node)} nodes]>"

    def __contains__(self, worker: str) -> bool:
        return worker in self._leases

    def grant(self, worker: str, node: str, share: DeviceShare, parked: ParkedMemory | None = None) -> None:
        """Grant a lease, or replace the worker's lease."""
        self.release(worker)
        lease = Lease(worker, node, share, parked)
        self._leases[worker] = lease
        self._by_node.setdefault(node, {})[worker] = lease
        self._used.pop(node, None)

    def release(self, worker: str) -> None:
        """Release the worker's lease, if it has one."""
        lease = self._leases.pop(worker, None)
        if lease is None:
            return
        leases = self._by_node[lease.node]
        del leases[worker]
        if not leases:
            del self._by_node[lease.node]
        self._used.pop(lease.node, None)

    def used(self, node: str) -> NodeUse:
        used = self._used.get(node)
        if used is None:
            leases = self._by_node.get(node)
            used = self._used[node] = _sum(leases.values()) if leases else _NO_USE
        return used

    def cache(self, key: Hashable) -> dict[str, Any]:
        """Return a cache by node for values that are computed from `used(node)` and expensive. Copies of a book share
        it: a value is valid only for the very `NodeUse` object that it was computed from."""
        if key not in self._caches and len(self._caches) >= _MAX_CACHED_KINDS:
            self._caches.clear()
        return self._caches.setdefault(key, {})

    def forget(self, node: str) -> None:
        """Drop the cached values of a node that has disappeared."""
        for cache in self._caches.values():
            cache.pop(node, None)

    def copy(self) -> LeaseBook:
        """Return a copy for trying out grants."""
        for node in self._by_node:
            self.used(node)  # otherwise each copy would compute its own `NodeUse`, and no cached value would be valid
        twin = LeaseBook()
        twin._leases = dict(self._leases)
        twin._by_node = {node: dict(leases) for node, leases in self._by_node.items()}
        twin._used = dict(self._used)
        twin._caches = self._caches
        return twin


def _sum(leases: Iterable[Lease]) -> NodeUse:
    cores, memory_bytes = 0.0, 0
    gpus: dict[str, GpuUse] = {}
    for lease in leases:
        share, parked = lease.share, lease.parked
        cores += share.cores if parked is None else 0.0
        memory_bytes += share.memory_bytes + (parked.host_bytes if parked is not None else 0)
        for uuid in share.gpus:
            use = _of(lease)
            gpus[uuid] = _add(gpus[uuid], use) if uuid in gpus else use
    return NodeUse(cores, memory_bytes, gpus)


def _of(lease: Lease) -> GpuUse:
    """Return the use of each of a worker's GPUs."""
    share, parked = lease.share, lease.parked
    if parked is not None:
        return GpuUse(share.mode, share.trust_domain, 0, parked.device_bytes, 0, share.contained, parked=1)
    sm_percent = share.sm_percent if share.sm_percent < 100 else 0
    return GpuUse(share.mode, share.trust_domain, 1, share.vram_bytes, sm_percent, share.contained)


def _add(a: GpuUse, b: GpuUse) -> GpuUse:
    return GpuUse(
        # Two modes on one GPU must not occur; if they do, no other worker is placed there.
        a.mode if a.mode is b.mode else Share.EXCLUSIVE,
        a.trust_domain,
        a.workers + b.workers,
        a.vram_bytes + b.vram_bytes,
        a.sm_percent + b.sm_percent,
        a.contained,
        a.parked + b.parked,
    )
