"""Garbage collector: runs once a minute, and after a function was deleted until none of its revisions is in use.
`gpufn_gateway.garbage_collection.rules` selects the objects to remove.

Every gateway runs this, and the controller's leader acts, because it knows the running workers and calls:

1. revisions, each by compare-and-set after reading its Function's record; then the consumers of its queues
2. build records
3. blobs that no record names, and the remains of interrupted uploads. The watches may lag, so the stored records are
   read before a blob is removed. A process that is about to name a blob touches it first
   (`gpufn_platform.bus.storage.object_store`)
4. queued calls past their deadline, whose caller has left

A pass also records maps that have ended (`gpufn_gateway.maps.map_closer`), and removes unneeded arguments
(`gpufn_gateway.garbage_collection.argument_files`) and files of volumes (`gpufn_gateway.volumes.volumes`).

A pass that fails is abandoned, and the next one starts over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Final

from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.errors import Conflict
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.priority import QUEUES
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.buckets import Buckets, decode_build, decode_function, decode_manifest, decode_revision, records
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.garbage_collection import rules
from gpufn_gateway.garbage_collection.argument_files import ArgumentFiles
from gpufn_gateway.maps.map_closer import MapCloser
from gpufn_gateway.volumes.volumes import VolumeFileCollection, Volumes
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import queue_position

log = logging.getLogger(__name__)

_EVERY_S: Final = 60.0
_AFTER_A_DELETE_S: Final = 5.0  # most of its workers have ended by then


@dataclass(kw_only=True, eq=False)
class GarbageCollector:
    """`in_use()` returns the revisions that have workers or calls, as (function, number). It returns None while that is
    unknown or this process does not lead; then nothing is collected."""

    bus: Bus
    buckets: Buckets
    registry: Registry
    builds: Builds
    volumes: Volumes
    in_use: Callable[[], Set[RevisionKey] | None]
    kept_revisions: int
    clock: Clock

    def __post_init__(self) -> None:
        self._maps = MapCloser(self.bus)
        self._arguments = ArgumentFiles(self.bus, self.clock)
        self._volume_files = VolumeFileCollection(self.volumes, self.clock, rules.YOUNG_S)
        self._requested = asyncio.Event()

    def on_deleted(self, function: str) -> None:
        """Schedule a pass soon."""
        self._requested.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._requested.wait()
                    await asyncio.sleep(_AFTER_A_DELETE_S)
            self._requested.clear()
            with log_failures("collecting garbage"):
                if self._deleted_are_in_use():
                    self._requested.set()
                await self.step()

    async def step(self) -> None:
        in_use = self._numbers_in_use()
        if in_use is None:
            return
        for name in list(self.registry.revisions):
            if self._changes(name, self.registry.functions.get(name), in_use):
                await self._collect_revisions(name)
            await asyncio.sleep(0)  # let the event loop serve calls
        await self._collect_builds()
        await self._collect_blobs()
        await self._volume_files.step()
        await self._maps.step()
        await self._arguments.step()
        if ended := await queue_position.end_overdue(self.bus, self.clock.time()):
            log.info("ended %d queued calls that were past their deadline", ended)

    # --- revisions ----------------------------------------------------------------------------------------------------

    async def _collect_revisions(self, name: str) -> None:
        entry = await self.buckets.functions.get(name)
        function = None if entry is None else decode_function(entry.value)
        before = dict(self.registry.revisions.get(name, {}))  # a copy: the watch changes it in the meantime
        for number, after in self._changes(name, function, self._numbers_in_use()).items():
            try:
                await self._change(subjects.revision_key(name, number), before[number], after)
            except Conflict:
                continue  # it was changed concurrently; the next pass looks again
            if after is None:
                for kind in QUEUES:
                    queue = queue_position.address(name, number, kind)
                    await streams.delete_consumer(self.bus, queue.stream, queue.consumer)
            outcome = "was removed" if after is None else f"is {after.state}"
            log.info("%s@%d is unused: it %s", name, number, outcome, extra={"function": name, "revision": number})

    def _deleted_are_in_use(self) -> bool:
        """Return whether revisions of deleted functions are still in use, so that a later pass can collect more."""
        in_use = self.in_use()
        return in_use is not None and any(name not in self.registry.functions for name, _ in in_use)

    def _numbers_in_use(self) -> dict[str, set[int]] | None:
        in_use = self.in_use()
        if in_use is None:
            return None
        numbers: dict[str, set[int]] = {}
        for name, number in in_use:
            numbers.setdefault(name, set()).add(number)
        return numbers

    def _changes(
        self, name: str, function: Function | None, in_use: dict[str, set[int]] | None
    ) -> dict[int, Revision | None]:
        if in_use is None:
            return {}
        revisions = self.registry.revisions.get(name, {})
        numbers = in_use.get(name, set())
        return rules.changes(revisions, function, numbers, kept=self.kept_revisions, now=self.clock.time())

    async def _change(self, key: str, before: Revision, after: Revision | None) -> None:
        """Write or delete a record. Raises Conflict if it differs from `before`."""
        entry = await self.buckets.revisions.get(key)
        if entry is None or decode_revision(entry.value) != before:
            raise Conflict(f"{before} was changed in the meantime.")
        if after is None:
            await self.buckets.revisions.delete(key, entry.revision)
        else:
            await self.buckets.revisions.update(key, encode(after), entry.revision)

    # --- builds and blobs ---------------------------------------------------------------------------------------------

    async def _collect_builds(self) -> None:
        expired = rules.expired_builds(self.builds.known.values(), self.registry.all_revisions(), self.clock.time())
        for build in expired:
            await self.buckets.builds.delete(build.id)
        if expired:
            log.info("removed the records of %d builds that ended long ago", len(expired))

    async def _collect_blobs(self) -> None:
        before = self.clock.time() - rules.YOUNG_S
        known = rules.named_blobs(
            self.registry.all_revisions(), self.builds.known.values(), self.registry.manifests.values()
        )
        unnamed: dict[str, list[object_store.Blob]] = {}
        for bucket, named in known.items():
            await object_store.remove_unfinished(self.bus, bucket, before)
            blobs = await object_store.blobs(self.bus, bucket)
            unnamed[bucket] = [blob for blob in blobs if blob.put_at < before and blob.digest not in named]
        if not any(unnamed.values()):
            return
        stored = rules.named_blobs(
            await records(self.buckets.revisions, decode_revision),
            await records(self.buckets.builds, decode_build),
            await records(self.buckets.engines, decode_manifest),
        )
        for bucket, blobs in unnamed.items():
            removable = [blob for blob in blobs if blob.digest not in stored[bucket]]
            freed = sum([blob.size for blob in removable if await object_store.remove(self.bus, bucket, blob)])
            if removable:
                log.info("removed %d unreferenced blobs of %s: %d bytes", len(removable), bucket, freed)
