"""The gateway's side of bodies that are too large for a message (`gpufn_platform.queue.large_bodies`): arguments that it stores, and
results of calls that it waits for."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import BodyReference
from gpufn_gateway.calls.call_bodies import CallBody
from gpufn_gateway.calls.shared_bodies import GatewayParcels
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import large_bodies


class References:
    def __init__(self, bus: Bus, parcels: GatewayParcels | None) -> None:
        self._bus = bus
        self._parcels = parcels
        self._removals = Tasks("removal of bodies")

    async def store(self, body: CallBody, *, owner: str, ttl_s: float | None = None) -> BodyReference:
        """The arguments of a call. Raises CapacityError when the store is full, BusUnavailable."""
        if body.parcel is None or self._parcels is None:
            return await self.store_bytes(body.data, owner=owner, ttl_s=ttl_s)
        path = self._parcels.path_of(body.parcel)
        return await large_bodies.store_file(self._bus, subjects.ARGUMENT_FILES, path, owner=owner, ttl_s=ttl_s)

    async def store_bytes(self, data: bytes | memoryview, *, owner: str, ttl_s: float | None = None) -> BodyReference:
        """Raises as `store`."""
        return await large_bodies.store(self._bus, subjects.ARGUMENT_FILES, data, owner=owner, ttl_s=ttl_s)

    def remove(self, reference: BodyReference) -> None:
        """The call that had these arguments has ended."""
        self._removals.start(large_bodies.remove(self._bus, subjects.ARGUMENT_FILES, reference))

    def result(self, reference: BodyReference) -> AsyncGenerator[bytes, None]:
        """Raises ArtifactUnavailable, before the first part or instead of the end; BusUnavailable."""
        return large_bodies.read(self._bus, subjects.RESULT_FILES, reference)

    def remove_result(self, reference: BodyReference) -> None:
        """Its caller has it."""
        self._removals.start(large_bodies.remove(self._bus, subjects.RESULT_FILES, reference))
