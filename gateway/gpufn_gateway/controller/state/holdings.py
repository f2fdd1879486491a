"""Resources of workers in each desired state: their leases, and host memory while they are parked. Pure.

1. requested to run: its whole share
2. requested to park: still its whole share, and the host memory that parking is expected to take
3. proven to be parked: the host memory that it occupies, and the rest on its GPUs
4. requested to run: its whole share again, before the worker knows
"""

from __future__ import annotations

import msgspec

from gpufn_core.domain.worker import Desired, ParkedMemory
from gpufn_gateway.controller.decide.room.host_memory import HostMemory, Parked
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.views import WorkerView


class Holdings:
    def __init__(self) -> None:
        self.leases = LeaseBook()
        self._host_memory: dict[str, HostMemory] = {}  # by node

    def host_memory(self, node: str) -> HostMemory:
        return self._host_memory.setdefault(node, HostMemory())

    def forget(self, node: str) -> None:
        """Drop a node that has disappeared and has no workers left."""
        self._host_memory.pop(node, None)
        self.leases.forget(node)

    def begin(self, worker: WorkerView) -> None:
        assignment, share = worker.assignment, worker.assignment.share
        if worker.reserved_bytes:
            share = msgspec.structs.replace(share, memory_bytes=share.memory_bytes + worker.reserved_bytes)
        self.leases.grant(assignment.worker, assignment.node, share, worker.parked)

    def end(self, worker: WorkerView) -> None:
        self.leases.release(worker.assignment.worker)
        self.host_memory(worker.assignment.node).release(worker.assignment.worker)

    def set_desired(self, worker: WorkerView, desired: Desired, park_bytes: int = 0, expected_bytes: int = 0) -> None:
        """Apply a desired state. When parking, the worker may take `park_bytes` of host memory and is expected to take
        `expected_bytes`."""
        worker.drain_requested = worker.drain_requested or desired is Desired.DRAIN
        if desired is Desired.DRAIN:
            return  # it holds its resources until it has ended
        worker.park_requested, worker.park_bytes = desired is Desired.PARK, park_bytes
        worker.parked = None
        worker.reserved_bytes = expected_bytes
        memory = self.host_memory(worker.assignment.node)
        memory.release(worker.assignment.worker)
        if worker.park_requested:
            memory.reserve(worker.assignment.worker, expected_bytes)
        self.begin(worker)

    def record_parked(self, worker: WorkerView, parked: ParkedMemory, *, uses: int, saved_s: float) -> bool:
        """Record the verified memory of a parked worker. Return whether it is new. `uses` and `saved_s` are as in
        `host_memory.Parked`."""
        is_new = worker.parked != parked
        if is_new:
            worker.parked, worker.reserved_bytes = parked, 0
            self.begin(worker)
        held = Parked(worker.assignment.worker, parked.host_bytes, uses, saved_s)
        self.host_memory(worker.assignment.node).add(held)
        return is_new
