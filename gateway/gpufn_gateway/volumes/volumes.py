"""The volumes of the platform. A commit publishes a new version:

1. check that the files it adds are uploaded. This renews their age, so the garbage collector keeps them
2. read the newest version, and make the list of files of the next one
3. check the limits of the volume and of its team, and store the list
4. replace the volume's record, unless another commit replaced it meanwhile; otherwise go back to 2

A crash before 4 leaves the old version. The lists of files never change, so they are kept in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Final

import msgspec

from gpufn_core.errors import ArtifactUnavailable, Conflict, DataNotFound, InvalidSpec, PayloadTooLarge
from gpufn_core.ids import digest_of
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.units import format_bytes
from gpufn_core.spec.volume_spec import (
    MAX_VERSIONS,
    VolumeChange,
    VolumeFile,
    VolumeRecord,
    VolumeTree,
    VolumeVersion,
    changed,
    check_base,
    decode_files,
    encode_files,
    stored_bytes,
)
from gpufn_gateway.teams.storage import TeamStorage
from gpufn_platform.bus.storage import object_store
from gpufn_platform.bus.storage.key_value import Entry, KeyValue, Watch
from gpufn_platform.process.clock import Clock
from gpufn_platform.volume_store.store import VolumeStore

log = logging.getLogger(__name__)

_TRIES: Final = 20  # each lost race means that another commit succeeded
_AT_ONCE: Final = 64
_MAX_CACHED: Final = 200  # lists of files

_record = msgspec.msgpack.Decoder(VolumeRecord)


class Volumes:
    """`store` has the files, and `limit_bytes` is the largest volume, with all of its versions."""

    def __init__(
        self, store: VolumeStore, bucket: KeyValue, storage: TeamStorage, clock: Clock, limit_bytes: int
    ) -> None:
        self.store = store
        self._bucket = bucket
        self._storage = storage
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._records: dict[str, VolumeRecord] = {}
        self._files: dict[str, tuple[VolumeFile, ...]] = {}
        self._watch: Watch | None = None
        storage.volumes = self.all

    async def start(self) -> None:
        """Start the watch. Returns once all volumes are known."""
        self._watch = await self._bucket.watch(self._on_change)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def all(self) -> list[VolumeRecord]:
        """List the volumes by name."""
        return [self._records[name] for name in sorted(self._records)]

    def exists(self, name: str) -> bool:
        return name in self._records

    async def read(self, name: str) -> VolumeRecord:
        """Return a volume's record. Raises DataNotFound."""
        record, _ = await self._stored(name)
        if record is None:
            raise no_such_volume(name)
        return record

    async def tree(self, name: str, version: int | None = None) -> VolumeTree:
        """Return a version, the newest for None. Raises DataNotFound, ArtifactUnavailable."""
        record = await self.read(name)
        found = record.version(version)
        if found is None:
            kept = ", ".join(str(each.number) for each in record.versions)
            raise DataNotFound(f"{name} has no version {version}. It has {kept}.")
        return VolumeTree(name, found.number, await self._manifest(found))

    async def has_file(self, digest: str) -> bool:
        """Return whether a file is stored. This renews its age, because a commit is about to name it."""
        return await self.store.touch(digest) is not None

    async def missing(self, digests: Sequence[str]) -> list[str]:
        """Return which of these files are not stored."""
        found: list[str] = []
        for at in range(0, len(digests), _AT_ONCE):
            batch = digests[at : at + _AT_ONCE]
            stored = await asyncio.gather(*map(self.has_file, batch))
            found += [digest for digest, is_stored in zip(batch, stored, strict=True) if not is_stored]
        return found

    async def put_file(self, digest: str, size: int, parts: AsyncIterator[bytes]) -> None:
        """Store a file. Consumes `parts` even if the file exists. Raises InvalidInput if the digest does not match."""
        if await self.has_file(digest):
            await object_store.check(digest, size, parts)
        else:
            await self.store.put_stream(digest, size, parts)

    async def open_file(self, name: str, digest: str) -> tuple[int, AsyncGenerator[bytes, None]]:
        """Return the size and the bytes of a file that a kept version of the volume has. Raises DataNotFound."""
        for version in reversed((await self.read(name)).versions):
            for file in await self._manifest(version):
                if file.digest == digest:
                    return file.size, self.store.read(digest)
        raise DataNotFound(f"{name} has no file with the digest {digest[:12]}.")

    async def commit(self, name: str, change: VolumeChange) -> VolumeVersion:
        """Publish a new version. A change without effect returns the newest one. Raises InvalidSpec, InvalidInput,
        Conflict, PayloadTooLarge, StorageLimitExceeded."""
        await self._check_uploaded(change.put)
        for _ in range(_TRIES):
            record, revision = await self._stored(name)
            check_base(name, record, change)
            newest = None if record is None else record.newest
            files = () if newest is None else await self._manifest(newest)
            tree = changed(name, 1 if newest is None else newest.number + 1, files, change)
            if newest is not None and tree.files == files:
                return newest
            following = await self._next(record, tree)
            await self._check_limits(record, following)
            await self.store.put(encode_files(tree))
            try:
                await self._write(following, revision)
            except Conflict:
                continue
            return following.newest
        raise Conflict(f"{name} is being changed by too many clients at once; try again.")

    async def remove(self, name: str) -> None:
        """Delete a volume with all of its versions. Raises DataNotFound."""
        await self.read(name)
        await self._bucket.delete(name)

    async def named_files(self) -> set[str]:
        """Return the digests of all files and lists that stored volumes name. Raises ArtifactUnavailable."""
        entries = await self._bucket.entries()
        versions = [version for entry in entries for version in _record.decode(entry.value).versions]
        named = {version.manifest for version in versions}
        for version in versions:
            named |= {file.digest for file in await self._manifest(version)}
        return named

    # --- internals ---------------------------------------------------------------------------------------------------

    async def _stored(self, name: str) -> tuple[VolumeRecord | None, int]:
        """Return the record on the bus, and its revision. The watch may lag."""
        entry = await self._bucket.get(name)
        return (None, 0) if entry is None else (_record.decode(entry.value), entry.revision)

    async def _write(self, record: VolumeRecord, revision: int) -> None:
        """Replace the record at `revision`; 0: create it. Raises Conflict."""
        value = encode(record)
        if revision:
            await self._bucket.update(record.name, value, revision)
        else:
            await self._bucket.create(record.name, value)

    async def _manifest(self, version: VolumeVersion) -> tuple[VolumeFile, ...]:
        if (known := self._files.get(version.manifest)) is not None:
            return known
        manifest = await self.store.get(version.manifest)
        files = await asyncio.to_thread(decode_files, manifest)
        self._keep(version.manifest, files)
        return files

    def _keep(self, digest: str, files: tuple[VolumeFile, ...]) -> None:
        while len(self._files) >= _MAX_CACHED:
            del self._files[next(iter(self._files))]
        self._files[digest] = files

    async def _next(self, record: VolumeRecord | None, tree: VolumeTree) -> VolumeRecord:
        manifest = digest_of(encode_files(tree))
        self._keep(manifest, tree.files)
        total = sum(file.size for file in tree.files)
        version = VolumeVersion(tree.version, manifest, len(tree.files), total, self._clock.time())
        versions = (*(() if record is None else record.versions), version)[-MAX_VERSIONS:]
        manifests = [await self._manifest(each) for each in versions]
        return VolumeRecord(tree.volume, versions, stored_bytes(manifests))

    async def _check_limits(self, record: VolumeRecord | None, following: VolumeRecord) -> None:
        before = 0 if record is None else record.stored_bytes
        if following.stored_bytes <= before:
            return
        if following.stored_bytes > self._limit_bytes:
            raise PayloadTooLarge(
                f"{following.name} would have {format_bytes(following.stored_bytes)} with its kept versions, more than "
                f"the {format_bytes(self._limit_bytes)} that GPUFN_MAX_VOLUME_BYTES allows: use several volumes"
            )
        await self._storage.check_volume(following.name, following.stored_bytes - before)

    async def _check_uploaded(self, files: Iterable[VolumeFile]) -> None:
        """Raises InvalidSpec naming the first file that is not stored with its size."""
        wanted = list({file.digest: file for file in files}.values())
        for at in range(0, len(wanted), _AT_ONCE):
            batch = wanted[at : at + _AT_ONCE]
            sizes = await asyncio.gather(*(self.store.touch(file.digest) for file in batch))
            for file, size in zip(batch, sizes, strict=True):
                if size is None:
                    raise InvalidSpec(f"the file {file.path} ({file.digest[:12]}) is not uploaded: upload it first")
                if size != file.size:
                    raise InvalidSpec(f"the file {file.path} has {size:,} bytes, and the commit says {file.size:,}")

    def _on_change(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._records.pop(key, None)
        else:
            self._records[key] = _record.decode(entry.value)


class VolumeFileCollection:
    """Removes the files that no version names. Young ones stay, because a commit may follow their upload."""

    def __init__(self, volumes: Volumes, clock: Clock, young_s: float) -> None:
        self._volumes = volumes
        self._clock = clock
        self._young_s = young_s

    async def step(self) -> None:
        before, store = self._clock.time() - self._young_s, self._volumes.store
        await store.remove_unfinished(before)
        old = [file for file in await store.files() if file.put_at < before]
        if not old:
            return
        try:
            named = await self._volumes.named_files()
        except ArtifactUnavailable as error:
            log.warning("files of volumes are not collected: %s", error.message)
            return
        removable = [file for file in old if file.digest not in named]
        freed = sum([file.size for file in removable if await store.remove(file)])
        if removable:
            log.info("removed %d unused files of volumes: %d bytes", len(removable), freed)


def no_such_volume(name: str) -> DataNotFound:
    return DataNotFound(f"There is no volume {name}: see `gpufn volume ls`.")
