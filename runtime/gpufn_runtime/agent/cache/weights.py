"""Cache of the node's weights and volumes, shared read-only by all workers. A load reads the page cache, this disk, or
the origin.

get       1. if the weights are complete on the disk, return their path
          2. make room within the limit: remove the least recently used weights that no worker uses
          3. fetch the absent files, each once for all concurrent callers; verify, flush and rename each
          4. check safetensors files, link all files into a folder, and rename it into place
prefetch  the same in the background, once for each manifest and one manifest at a time. It removes no weights that a
          deployed function uses
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from gpufn_core.errors import ArtifactUnavailable, GpufnError
from gpufn_core.protocol.reports import WeightsFetch, WeightsReport
from gpufn_core.remove_folder import remove_tree
from gpufn_core.spec.file_tree import FileTree, TreeFile
from gpufn_core.spec.units import format_bytes
from gpufn_platform.process.tasks import Tasks
from gpufn_runtime.agent.cache import folder_cache
from gpufn_runtime.agent.cache.transfer_rate import TransferRate
from gpufn_runtime.agent.cache.weights_disk import PartFile, WeightsDisk, WrongContent
from gpufn_runtime.agent.cache.weights_fetch import to_end
from gpufn_runtime.agent.decide.eviction import evicted

log = logging.getLogger(__name__)

_SPARE_BYTES: Final = 1 << 30  # of the disk, for everything else on it
_AT_ONCE: Final = 4  # files of one fetch; a limit of all fetches would let one that is stuck delay the others
_DEFAULT_PART: Final = 2  # the default limit is the disk's size divided by this

# Returns the digests of weights that must stay; None: unknown, so all must stay.
InUse = Callable[[], set[str] | None]


class Fetch(Protocol):
    async def fetch(self, spec: FileTree, file: TreeFile, part: PartFile) -> None: ...


class WeightsCache:
    """Weights on the disk below `root`, `limit_bytes` at most."""

    def __init__(self, root: Path, fetch: Fetch, limit_bytes: int | None = None) -> None:
        self._root = root
        self._disk = WeightsDisk(root)
        self._fetch = fetch
        self._limit_bytes = self._disk.disk()[0] // _DEFAULT_PART if limit_bytes is None else limit_bytes
        self._folders = folder_cache.SharedTasks("weights")
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # by key or digest
        self._prefetches = Tasks()
        self._prefetching = asyncio.Lock()  # one at a time, so that starts get most of the bandwidth
        self._prefetched: set[str] = set()
        self._active: dict[str, FileTree] = {}  # being fetched, by digest
        self._parts: dict[str, PartFile] = {}  # files in transfer, by key
        self._complete: set[str] = set()  # digests of the weights on the disk
        self._bytes_per_s: float | None = None  # of the last large fetch
        self._space = asyncio.Lock()  # decisions about room, one at a time
        self._hits = self._misses = self._fetched_bytes = self._evicted_bytes = self._stored_bytes = 0

    def sweep(self) -> None:
        """Remove what an earlier agent left incomplete."""
        self._disk.sweep()
        self._stored_bytes = sum(self._disk.sizes().values())
        self._complete = {stored.digest for stored in self._disk.stored()}

    async def get(self, spec: FileTree, in_use: InUse) -> Path:
        """Return the path of the weights for a start. Raises ArtifactUnavailable, BusUnavailable.

        Cancelling this does not cancel the fetch.
        """
        if (path := self._find(spec)) is not None:
            self._hits += 1
            return path
        self._misses += 1
        return await self._ensure(spec, in_use)

    def prefetch(self, specs: Iterable[FileTree], in_use: InUse) -> None:
        """Start to fetch the weights that were never prefetched before, one after the other."""
        for spec in specs:
            if spec.digest not in self._prefetched:
                self._prefetched.add(spec.digest)
                self._prefetches.start(self._prefetch(spec, in_use), f"prefetch-{spec.digest[:12]}")

    def report(self) -> WeightsReport:
        fetches = tuple(
            WeightsFetch(digest, spec.source, min(self._done_bytes(spec), spec.size), spec.size)
            for digest, spec in self._active.items()
        )
        return WeightsReport(
            hits=self._hits,
            misses=self._misses,
            fetched_bytes=self._fetched_bytes,
            evicted_bytes=self._evicted_bytes,
            stored_bytes=self._stored_bytes,
            limit_bytes=self._limit_bytes,
            fetches=fetches,
            complete=tuple(sorted(self._complete)),
            bytes_per_s=self._bytes_per_s,
        )

    async def _prefetch(self, spec: FileTree, in_use: InUse) -> None:
        try:
            async with self._prefetching:
                if self._find(spec) is None:
                    await self._ensure(spec, in_use)
        except GpufnError as error:  # a start tries again, and reports the error to its callers
            log.warning("cannot prefetch weights: %s", error.message)

    def _find(self, spec: FileTree) -> Path | None:
        if (path := self._disk.find(spec)) is None:  # a worker may have changed them
            self._complete.discard(spec.digest)
        return path

    async def _ensure(self, spec: FileTree, in_use: InUse) -> Path:
        origin = f"{spec.digest} {spec.source} {spec.commit}"  # another origin of equal files may fail
        await self._folders.run(origin, lambda _: self._fetch_in_turn(spec, in_use))
        if (path := self._find(spec)) is None:
            raise ArtifactUnavailable(f"The {spec.title} changed on this node while a worker started. Try again.")
        return path

    async def _fetch_in_turn(self, spec: FileTree, in_use: InUse) -> None:
        async with self._lock(spec.digest):
            if self._find(spec) is None:
                await self._fetch_all(spec, in_use)

    async def _fetch_all(self, spec: FileTree, in_use: InUse) -> None:
        at_once, rate = asyncio.Semaphore(_AT_ONCE), TransferRate()
        try:
            self._disk.ensure()
            await self._make_room(spec, in_use)
            try:
                async with asyncio.TaskGroup() as tasks:
                    for key, file in {spec.key(file): file for file in spec.files}.items():
                        tasks.create_task(self._fetch_file(spec, file, key, at_once, rate))
            except* (GpufnError, OSError) as errors:
                raise _first(errors) from None
            await asyncio.to_thread(self._disk.publish, spec)
            self._complete.add(spec.digest)
            self._bytes_per_s = rate.bytes_per_s or self._bytes_per_s
        except OSError as error:
            async with self._space:  # weights that start to be fetched meanwhile would lose their files
                self._active.pop(spec.digest, None)
                await asyncio.to_thread(self._disk.remove_unused, self._wanted())  # the disk may be full
            reason = folder_cache.why_not_written(error)
            raise ArtifactUnavailable(f"Cannot store the {spec.title} in {self._root}: {reason}.") from error
        finally:
            self._active.pop(spec.digest, None)
            self._stored_bytes = sum((await asyncio.to_thread(self._disk.sizes)).values())
        log.info("fetched the %s: %s", spec.title, format_bytes(spec.size))

    async def _fetch_file(
        self, spec: FileTree, file: TreeFile, key: str, at_once: asyncio.Semaphore, rate: TransferRate
    ) -> None:
        async with at_once, self._lock(key):  # other weights may contain the same file
            if not await asyncio.to_thread(self._disk.has_file, key, file.size):
                await self._transfer(spec, file, key, rate)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _transfer(self, spec: FileTree, file: TreeFile, key: str, rate: TransferRate) -> None:
        now = asyncio.get_running_loop().time
        part = self._parts[key] = self._disk.part(key, file.size)
        is_resumable = False
        rate.begin(now())
        try:
            await self._fetch.fetch(spec, file, part)
            await to_end(asyncio.to_thread(part.finish, file.digest))
            is_resumable = True
        except WrongContent as error:
            raise ArtifactUnavailable(
                f"{spec.source}: {file.path} is not the file of the deploy: {error}. Deploy again."
            ) from error
        except (GpufnError, asyncio.CancelledError):
            is_resumable = True
            raise
        finally:
            del self._parts[key]
            rate.end(now(), part.received)
            self._fetched_bytes += part.received
            # Not in a thread: a second cancellation would leave the file open.
            if is_resumable:
                part.close()
            else:
                part.discard()

    async def _make_room(self, spec: FileTree, in_use: InUse) -> None:
        """Remove weights until `spec` fits, and reserve its space. Raises ArtifactUnavailable."""
        async with self._space:
            self._active[spec.digest] = spec
            wanted = self._wanted()
            freed = await asyncio.to_thread(self._remove_unused, wanted)
            short = await asyncio.to_thread(self._short_bytes, wanted)
            if short > 0:
                await self._evict(spec, short, in_use, wanted)
            self._evicted_bytes += freed

    async def _evict(self, spec: FileTree, short: int, in_use: InUse, wanted: dict[str, int]) -> None:
        stored = [
            msgspec.structs.replace(each, files={key: size for key, size in each.files.items() if key not in wanted})
            for each in await asyncio.to_thread(self._disk.stored)
        ]
        kept = in_use()
        chosen = None if kept is None else evicted(stored, short, kept | self._active.keys())
        for digest in chosen or ():
            if (used := in_use()) is None or digest in used:  # a worker started meanwhile
                continue
            log.info("removing weights %s: others need the space", digest[:12])
            self._complete.discard(digest)
            hidden = self._disk.hide(digest)  # at once: a start that follows fetches them again
            await asyncio.to_thread(remove_tree, hidden)
        self._disk.touch(kept or ())
        self._evicted_bytes += await asyncio.to_thread(self._remove_unused, wanted)
        if await asyncio.to_thread(self._short_bytes, wanted) > 0:
            limit, (_, free) = format_bytes(self._limit_bytes), self._disk.disk()
            raise ArtifactUnavailable(
                f"There is no room for the {spec.title} ({format_bytes(spec.size)}): the limit is {limit} "
                f"(GPUFN_WEIGHTS_DISK), the disk has {format_bytes(free)} free, and weights of running workers stay."
            )

    def _wanted(self) -> dict[str, int]:
        """Return the sizes of all files of the weights that are being fetched, by key."""
        return {key: size for spec in self._active.values() for key, size in spec.sizes.items()}

    def _remove_unused(self, wanted: dict[str, int]) -> int:
        """Remove files of no weights if the space is needed. Runs in a thread."""
        return self._disk.remove_unused(wanted) if self._short_bytes(wanted) > 0 else 0

    def _short_bytes(self, wanted: dict[str, int]) -> int:
        """Return how much space is missing for the files `wanted`. Runs in a thread."""
        sizes = self._disk.sizes()
        over_limit = sum((sizes | wanted).values()) - self._limit_bytes
        missing = sum(max(0, size - sizes.get(key, 0)) for key, size in wanted.items())
        return max(over_limit, missing + _SPARE_BYTES - self._disk.disk()[1] if missing else 0)

    def _done_bytes(self, spec: FileTree) -> int:
        done = 0
        for key, size in spec.sizes.items():
            part = self._parts.get(key)
            done += part.done if part is not None else size if self._disk.has_file(key, size) else 0
        return done


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    """Return the first error of a group that may contain groups."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
