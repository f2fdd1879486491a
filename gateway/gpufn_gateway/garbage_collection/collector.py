"""What nobody needs any more goes, once a minute, and soon after a function was deleted until nothing of it runs.
`gpufn_gateway.garbage_collection.rules` decides.

Every gateway has one of these and the controller's leader acts, which knows what runs:

1. revisions, each by compare-and-set after a look at its Function's record, and then the consumers of its queues
2. builds' records
3. blobs that no record names, and what is left of uploads that broke off. The watches may lag, so what they say is over
   is looked for in the records themselves before it goes; who is about to name a blob touches it (`gpufn_platform.bus.storage.object_store`)
4. queued calls that are past their deadline, whose caller is gone

Maps that have ended are noted on the way (`gpufn_gateway.maps.map_closer`), and arguments that nobody needs are removed
(`gpufn_gateway.garbage_collection.argument_files`).

A pass that fails is left, and the next one begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Set
from typing import Final

import msgspec

from gpufn_core.domain.engine import Build, EngineManifest
from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.errors import Conflict
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.priority import QUEUES
from gpufn_gateway.background_loop import tried_again
from gpufn_gateway.buckets import Buckets, records
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.garbage_collection import rules
from gpufn_gateway.garbage_collection.argument_files import ArgumentFiles
from gpufn_gateway.maps.map_closer import EndedMaps
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import queue_position

log = logging.getLogger(__name__)

_EVERY_S: Final = 60.0
_AFTER_A_DELETE_S: Final = 5.0  # its workers have mostly ended by then

_function = msgspec.msgpack.Decoder(Function)
_revision = msgspec.msgpack.Decoder(Revision)
_build = msgspec.msgpack.Decoder(Build)
_manifest = msgspec.msgpack.Decoder(EngineManifest)


class Collection:
    """`in_use()` tells the revisions that have workers or calls, as (function, number); None while that is not known,
    or this process does not lead: then nothing is collected."""

    def __init__(
        self,
        bus: Bus,
        buckets: Buckets,
        *,
        registry: Registry,
        builds: Builds,
        in_use: Callable[[], Set[RevisionKey] | None],
        kept_revisions: int,
        clock: Clock,
    ) -> None:
        self._bus = bus
        self._buckets = buckets
        self._registry = registry
        self._builds = builds
        self._in_use = in_use
        self._kept_revisions = kept_revisions
        self._clock = clock
        self._maps = EndedMaps(bus)
        self._arguments = ArgumentFiles(bus, clock)
        self._asked = asyncio.Event()

    def on_deleted(self, function: str) -> None:
        """Collect soon."""
        self._asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._asked.wait()
                    await asyncio.sleep(_AFTER_A_DELETE_S)
            self._asked.clear()
            with tried_again("collecting what nobody needs"):
                if self._deleted_are_in_use():
                    self._asked.set()
                await self.step()

    async def step(self) -> None:
        in_use = self._numbers_in_use()
        if in_use is None:
            return
        for name in list(self._registry.revisions):
            if self._changes(name, self._registry.functions.get(name), in_use):
                await self._collect_revisions(name)
            await asyncio.sleep(0)  # there are calls to serve
        await self._collect_builds()
        await self._collect_blobs()
        await self._maps.step()
        await self._arguments.step()
        if ended := await queue_position.end_overdue(self._bus, self._clock.time()):
            log.info("ended %d queued calls that were past their deadline", ended)

    # --- revisions ----------------------------------------------------------------------------------------------------

    async def _collect_revisions(self, name: str) -> None:
        entry = await self._buckets.functions.get(name)
        function = None if entry is None else _function.decode(entry.value)
        before = dict(self._registry.revisions.get(name, {}))  # which the watch changes meanwhile
        for number, after in self._changes(name, function, self._numbers_in_use()).items():
            try:
                await self._change(subjects.revision_key(name, number), before[number], after)
            except Conflict:
                continue  # somebody else changed it; the next pass looks again
            if after is None:
                for kind in QUEUES:
                    queue = queue_position.address(name, number, kind)
                    await streams.delete_consumer(self._bus, queue.stream, queue.consumer)
            what = "is gone" if after is None else f"is {after.state}"
            log.info("nobody needs %s@%d: it %s", name, number, what, extra={"function": name, "revision": number})

    def _deleted_are_in_use(self) -> bool:
        """Whether a later pass has more to collect of a deleted function than one that begins now."""
        in_use = self._in_use()
        return in_use is not None and any(name not in self._registry.functions for name, _ in in_use)

    def _numbers_in_use(self) -> dict[str, set[int]] | None:
        in_use = self._in_use()
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
        revisions = self._registry.revisions.get(name, {})
        numbers = in_use.get(name, set())
        return rules.changes(revisions, function, numbers, kept=self._kept_revisions, now=self._clock.time())

    async def _change(self, key: str, before: Revision, after: Revision | None) -> None:
        """Raises Conflict when it is not as it was decided about."""
        entry = await self._buckets.revisions.get(key)
        if entry is None or _revision.decode(entry.value) != before:
            raise Conflict(f"{before} was changed meanwhile.")
        if after is None:
            await self._buckets.revisions.delete(key, entry.revision)
        else:
            await self._buckets.revisions.update(key, encode(after), entry.revision)

    # --- builds and blobs ---------------------------------------------------------------------------------------------

    async def _collect_builds(self) -> None:
        over = rules.builds_over(self._builds.known.values(), self._registry.all_revisions(), self._clock.time())
        for build in over:
            await self._buckets.builds.delete(build.id)
        if over:
            log.info("forgot %d builds that ended long ago", len(over))

    async def _collect_blobs(self) -> None:
        before = self._clock.time() - rules.YOUNG_S
        known = rules.named_blobs(
            self._registry.all_revisions(), self._builds.known.values(), self._registry.manifests.values()
        )
        over: dict[str, list[object_store.Blob]] = {}
        for bucket, named in known.items():
            await object_store.remove_unfinished(self._bus, bucket, before)
            blobs = await object_store.blobs(self._bus, bucket)
            over[bucket] = [blob for blob in blobs if blob.put_at < before and blob.digest not in named]
        if not any(over.values()):
            return
        stored = await self._stored()
        for bucket, blobs in over.items():
            going = [blob for blob in blobs if blob.digest not in stored[bucket]]
            removed = sum([blob.size for blob in going if await object_store.remove(self._bus, bucket, blob)])
            if going:
                log.info("removed %d blobs of %s that nothing names: %d bytes", len(going), bucket, removed)

    async def _stored(self) -> dict[str, set[str]]:
        """The blobs that the records themselves name."""
        return rules.named_blobs(
            await records(self._buckets.revisions, _revision),
            await records(self._buckets.builds, _build),
            await records(self._buckets.engines, _manifest),
        )
