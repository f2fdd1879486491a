"""Which share of which node belongs to which worker, derived from the Assignments.

A lease exists as long as its Assignment does: it outlives the worker's process, never the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpufn.device import DeviceShare


class Lease(msgspec.Struct, frozen=True):
    worker: str
    node: str
    share: DeviceShare


class Used(msgspec.Struct, frozen=True):
    """What is leased of one node. `gpus` holds the leases on each GPU that has any: how many, and whether exclusive."""

    cores: float = 0.0
    memory_bytes: int = 0
    gpus: dict[str, tuple[int, bool]] = {}


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
        for lease in leases:
            self.grant(lease.worker, lease.node, lease.share)

    def __repr__(self) -> str:
        return f"<LeaseBook [{len(self._leases)} leases on {len(self._of_node)} nodes]>"

    def __contains__(self, worker: str) -> bool:
        return worker in self._leases

    def grant(self, worker: str, node: str, share: DeviceShare) -> None:
        """Granting again replaces."""
        self.release(worker)
        lease = Lease(worker, node, share)
        self._leases[worker] = lease
        self._of_node.setdefault(node, {})[worker] = lease
        self._used.pop(node, None)

    def release(self, worker: str) -> None:
        """Absent is fine."""
        lease = self._leases.pop(worker, None)
        if lease is None:
            return
        leases = self._of_node[lease.node]
        del leases[worker]
        if not leases:
            del self._of_node[lease.node]
        self._used.pop(lease.node, None)

    def used(self, node: str) -> Used:
        found = self._used.get(node)
        if found is None:
            found = self._used[node] = _sum(self._of_node.get(node, {}).values())
        return found

    def copy(self) -> LeaseBook:
        """One to try things in."""
        twin = LeaseBook()
        twin._leases = dict(self._leases)
        twin._of_node = {node: dict(leases) for node, leases in self._of_node.items()}
        twin._used = dict(self._used)
        return twin


def _sum(leases: Iterable[Lease]) -> Used:
    cores, memory_bytes = 0.0, 0
    gpus: dict[str, tuple[int, bool]] = {}
    for lease in leases:
        share = lease.share
        cores += share.cores
        memory_bytes += share.memory_bytes
        if share.gpu_device is not None:
            count, is_exclusive = gpus.get(share.gpu_device, (0, False))
            gpus[share.gpu_device] = (count + 1, is_exclusive or share.exclusive)
    return Used(cores, memory_bytes, gpus)
