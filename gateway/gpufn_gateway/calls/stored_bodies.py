"""Bodies that are too large for a message: arguments that the gateway stores, and results that it reads.

`gpufn_platform.queue.large_bodies` is the storage.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import BodyReference
from gpufn_gateway.calls.call_bodies import CallBody
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import large_bodies


class StoredBodies:
    def __init__(self, bus: Bus, shared_bodies: GatewaySharedBodies | None) -> None:
        self._bus = bus
        self._shared_bodies = shared_bodies
        self._removals = Tasks("removal of bodies")

    async def store(self, body: CallBody, *, owner: str, ttl_s: float | None = None) -> BodyReference:
        """Store the arguments of a call. Raises CapacityError if the store is full, BusUnavailable."""
        if body.shared is None or self._shared_bodies is None:
            return await self.store_bytes(body.data, owner=owner, ttl_s=ttl_s)
        path = self._shared_bodies.path_of(body.shared)
        return await large_bodies.store_file(self._bus, subjects.ARGUMENT_FILES, path, owner=owner, ttl_s=ttl_s)

    async def store_bytes(self, data: bytes | memoryview, *, owner: str, ttl_s: float | None = None) -> BodyReference:
        """Store bytes. Raises the exceptions of `store`."""
        return await large_bodies.store(self._bus, subjects.ARGUMENT_FILES, data, owner=owner, ttl_s=ttl_s)

    def remove(self, reference: BodyReference) -> None:
        """Remove the arguments of a call that has ended."""
        self._removals.start(large_bodies.remove(self._bus, subjects.ARGUMENT_FILES, reference))

    def result(self, reference: BodyReference) -> AsyncGenerator[bytes, None]:
        """Read a result in parts. Raises BusUnavailable, or ArtifactUnavailable before the first part or later."""
        return large_bodies.read(self._bus, subjects.RESULT_FILES, reference)

    def remove_result(self, reference: BodyReference) -> None:
        """Remove a result that its caller has received."""
        self._removals.start(large_bodies.remove(self._bus, subjects.RESULT_FILES, reference))
