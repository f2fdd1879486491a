"""Bodies that are too large for a message, fetched from the object store for this node's workers. A worker has no
connection to the bus, so it gets a file, as for any large body (`gpufn_platform.shared_bodies.bodies`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import BodyReference
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import large_bodies
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies

_MAX_FETCHES: Final = 4  # each needs a window of 8 MiB in this process, whatever the size of the body


class NodeBodies:
    def __init__(self, bus: Bus, shared_bodies: NodeSharedBodies) -> None:
        self._bus = bus
        self._shared_bodies = shared_bodies
        self._fetch_limit = asyncio.Semaphore(_MAX_FETCHES)
        self._removals = Tasks("removal of bodies")

    async def fetch(self, bucket: str, reference: BodyReference, worker: str) -> str:
        """Fetch a body and return its name in the worker's folder. Raises ArtifactUnavailable if it no longer exists,
        BusUnavailable, and CapacityError if memory is full."""
        async with self._fetch_limit:
            with self._shared_bodies.writer(worker) as writer:
                await large_bodies.read_into(self._bus, bucket, reference, writer.write)
                return writer.keep()

    async def store_arguments(self, path: Path, *, owner: str, ttl_s: float | None = None) -> BodyReference:
        """Raises CapacityError if the store is full, BusUnavailable, and InvalidInput if the file changes."""
        return await large_bodies.store_file(self._bus, subjects.ARGUMENT_FILES, path, owner=owner, ttl_s=ttl_s)

    async def store_result(self, path: Path) -> BodyReference:
        """Store a result for a waiting caller. Raises like `store_arguments`."""
        owner, ttl_s = large_bodies.expiring_owner(), large_bodies.RESULT_EXPIRES_S
        return await large_bodies.store_file(self._bus, subjects.RESULT_FILES, path, owner=owner, ttl_s=ttl_s)

    def remove(self, bucket: str, reference: BodyReference | None) -> None:
        """Remove the arguments of an ended call, or a result that its caller has received. `reference` is None if they
        were in the message."""
        if reference is not None:
            self._removals.start(large_bodies.remove(self._bus, bucket, reference))

    async def finish(self) -> None:
        """Wait until all removals are done."""
        await self._removals.done()
