"""Bodies that were too large for their messages, fetched from the bus for the workers of this node: a worker has no
connection to the bus, so it is given a file, as with any large body (`gpufn_platform.shared_bodies.bodies`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import BodyReference
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import large_bodies
from gpufn_runtime.runner.workers.shared_bodies import NodeParcels

_AT_ONCE: Final = 4  # each has a window of 8 MiB in this process, whatever the size of the body


class NodeBodies:
    def __init__(self, bus: Bus, parcels: NodeParcels) -> None:
        self._bus = bus
        self._parcels = parcels
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._removals = Tasks("removal of bodies")

    async def fetch_arguments(self, reference: BodyReference, worker: str) -> str:
        """The name of the body in the worker's folder. Raises ArtifactUnavailable when it is gone, BusUnavailable, and
        CapacityError when memory is full."""
        return await self._fetch(subjects.ARGUMENT_FILES, reference, worker)

    async def fetch_result(self, reference: BodyReference, worker: str) -> str:
        """As `fetch_arguments`."""
        return await self._fetch(subjects.RESULT_FILES, reference, worker)

    async def store_arguments(self, path: Path, *, owner: str, ttl_s: float | None = None) -> BodyReference:
        """Raises CapacityError when the store is full, BusUnavailable; InvalidInput for a file that changes."""
        return await large_bodies.store_file(self._bus, subjects.ARGUMENT_FILES, path, owner=owner, ttl_s=ttl_s)

    async def store_result(self, path: Path) -> BodyReference:
        """For a caller who waits. Raises as `store_arguments`."""
        owner, ttl_s = large_bodies.waited_owner(), large_bodies.RESULT_EXPIRES_S
        return await large_bodies.store_file(self._bus, subjects.RESULT_FILES, path, owner=owner, ttl_s=ttl_s)

    def remove_arguments(self, reference: BodyReference | None) -> None:
        """The call has ended. None: its arguments were in its message."""
        if reference is not None:
            self._removals.start(large_bodies.remove(self._bus, subjects.ARGUMENT_FILES, reference))

    def remove_result(self, reference: BodyReference) -> None:
        """The caller has it."""
        self._removals.start(large_bodies.remove(self._bus, subjects.RESULT_FILES, reference))

    async def finish(self) -> None:
        """Wait until everything that is not needed is removed."""
        await self._removals.done()

    async def _fetch(self, bucket: str, reference: BodyReference, worker: str) -> str:
        async with self._turns:
            with self._parcels.writer(worker) as writer:
                await large_bodies.read_into(self._bus, bucket, reference, writer.write)
                return writer.keep()
