"""The versions of volumes that workers of this node read. The files themselves are in the cache of weights.

A worker reads the version that is the newest when it starts. Which versions running workers read is known from their
starts; after a restart of the agent it is unknown, and nothing is removed until these workers have ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import msgspec

from gpufn_core.domain.revision import Revision
from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import ArtifactUnavailable, InvalidSpec
from gpufn_core.spec.naming.names import home_of
from gpufn_core.spec.volume_spec import VolumeMount, VolumeRecord, VolumeTree, decode_files, full_name_at
from gpufn_platform.bus.storage.key_value import KeyValue

_record = msgspec.msgpack.Decoder(VolumeRecord)


class Volumes:
    """`fetch_manifest` returns the list of a version's files, by digest."""

    def __init__(self, records: KeyValue, fetch_manifest: Callable[[str], Awaitable[bytes]]) -> None:
        self._records = records
        self._fetch_manifest = fetch_manifest
        self._digests: dict[str, set[str]] = {}  # of the trees that a worker was given
        self._inherited: set[str] = set()  # workers of an earlier agent

    def inherit(self, workers: Iterable[str]) -> None:
        """Note the workers that an earlier agent started."""
        self._inherited = set(workers)

    async def newest(self, mount: VolumeMount, revision: Revision, worker: str) -> VolumeTree:
        """Return the newest version for a worker that starts now: an empty tree if there is none and the function may
        commit. Raises ArtifactUnavailable, BusUnavailable."""
        tree = await self._read(full_name_at(mount.name, home_of(revision.function)), mount)
        self._digests.setdefault(worker, set()).add(tree.digest)
        return tree

    async def _read(self, name: str, mount: VolumeMount) -> VolumeTree:
        entry = await self._records.get(name)
        if entry is None:
            if mount.writable:
                return VolumeTree(name, 0, ())
            raise ArtifactUnavailable(f"There is no volume {name}: fill it with `gpufn volume put {name} FOLDER`.")
        version = _record.decode(entry.value).newest
        manifest = await self._fetch_manifest(version.manifest)
        try:
            return VolumeTree(name, version.number, decode_files(manifest))
        except (*DECODE_ERRORS, InvalidSpec) as error:
            raise ArtifactUnavailable(f"Version {version.number} of {name} is damaged: {error}.") from error

    def in_use(self, workers: Iterable[str]) -> set[str] | None:
        """Return the digests of the trees that these workers may read, starting ones included; None if that is
        unknown. A worker without trees has not come to its volumes yet."""
        running = set(workers)
        self._digests = {worker: digests for worker, digests in self._digests.items() if worker in running}
        self._inherited &= running
        if self._inherited:
            return None
        return set[str]().union(*self._digests.values())
