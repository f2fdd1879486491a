"""Values that `gpufn.put` stores: in the bus's object store, and on the nodes that read them.

The first read on a node fetches the value into shared memory. Later ones read that copy. It is dropped when others need
the memory, the longest unused first.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from typing import Final

from gpufn_core.errors import ArtifactUnavailable, DataNotFound
from gpufn_core.protocol import subjects
from gpufn_core.protocol.data import StoredValue, value_tag
from gpufn_core.protocol.records import BodyReference
from gpufn_platform.bus.connection import Bus
from gpufn_platform.queue import large_bodies
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies

_KEPT_BYTES: Final = 256 << 20  # bytes of copies on a node


class StoredValues:
    def __init__(self, bus: Bus, shared_bodies: NodeSharedBodies) -> None:
        self._bus = bus
        self._shared_bodies = shared_bodies
        self._copies: OrderedDict[str, tuple[str, int]] = OrderedDict()  # by id: file and size, the last used last
        self.kept_bytes = _KEPT_BYTES
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def put(self, value: bytes, ttl_s: float, team: str = "") -> StoredValue:
        """Store a value. Raises CapacityError, BusUnavailable."""
        owner = large_bodies.expiring_owner(value_tag(team))
        reference = await large_bodies.store(self._bus, subjects.VALUES, value, owner=owner, ttl_s=ttl_s)
        return StoredValue.of(reference)

    async def get(self, id_: str, worker: str) -> str:
        """Hand a value to a worker; return its name in the worker's folder. Raises DataNotFound, CapacityError,
        BusUnavailable."""
        reference = StoredValue(id_, 0).reference
        async with self._locks.setdefault(id_, asyncio.Lock()):
            if id_ not in self._copies:
                await self._fetch(id_, reference)
            self._copies.move_to_end(id_)
            name = self._copies[id_][0]
            return await asyncio.to_thread(self._shared_bodies.hand_over_copy, name, worker)

    async def _fetch(self, id_: str, reference: BodyReference) -> None:
        with self._shared_bodies.copy_writer() as writer:
            try:
                await large_bodies.read_into(self._bus, subjects.VALUES, reference, writer.write)
            except ArtifactUnavailable:
                raise DataNotFound(f"There is no value {id_}: it may have expired.") from None
            name = writer.keep()
        size = self._shared_bodies.kept_path(name).stat().st_size
        self._copies[id_] = name, size
        while sum(size for _, size in self._copies.values()) > self.kept_bytes and len(self._copies) > 1:
            _, (oldest, _) = self._copies.popitem(last=False)
            self._shared_bodies.kept_path(oldest).unlink(missing_ok=True)
