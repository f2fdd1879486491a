"""The versions of volumes that workers of a node read."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.ids import Digest, digest_of
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.volume_spec import (
    EXECUTABLE,
    VolumeFile,
    VolumeMount,
    VolumeRecord,
    VolumeTree,
    VolumeVersion,
    encode_files,
)
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_runtime.agent.cache.volumes import Volumes
from gpufn_runtime.agent.cache.weights import WeightsCache
from gpufn_runtime.agent.cache.weights_disk import PartFile

_SPEC = FunctionSpec(name="prod/search/f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),))
_REVISION = Revision(function=_SPEC.name, number=1, spec=_SPEC, bundle=Digest("0" * 64), created_at=0.0)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def tree_of(version: int, *files: VolumeFile) -> VolumeTree:
    return VolumeTree("prod/search/models", version, files)


class Records:
    def __init__(self, tree: VolumeTree | None) -> None:
        self.tree = tree

    async def get(self, key: str) -> Entry | None:
        if self.tree is None or key != self.tree.volume:
            return None
        version = VolumeVersion(self.tree.version, "m", len(self.tree.files), 0, 0.0)
        return Entry(key, encode(VolumeRecord(key, (version,))), 1)

    async def manifest(self, digest: str) -> bytes:
        assert self.tree is not None
        return encode_files(self.tree)


def volumes_with(records: Records) -> Volumes:
    bucket: Any = records
    return Volumes(bucket, records.manifest)


@in_loop
async def test_a_worker_gets_the_newest_version_of_its_app(tmp_path: Path) -> None:
    records = Records(tree_of(3, VolumeFile("a", 1, "a" * 64)))
    volumes = volumes_with(records)
    assert await volumes.newest(VolumeMount("models"), _REVISION, "w-1") == records.tree
    with pytest.raises(ArtifactUnavailable):
        await volumes.newest(VolumeMount("other"), _REVISION, "w-1")
    assert await volumes.newest(VolumeMount("other", writable=True), _REVISION, "w-1") == VolumeTree(
        "prod/search/other", 0, ()
    )


@in_loop
async def test_a_damaged_list_of_files_fails_the_start() -> None:
    class Cut(Records):
        async def manifest(self, digest: str) -> bytes:
            return (await super().manifest(digest))[:-3]

    with pytest.raises(ArtifactUnavailable):
        await volumes_with(Cut(tree_of(1, VolumeFile("a", 1, "a" * 64)))).newest(
            VolumeMount("models"), _REVISION, "w-1"
        )


@in_loop
async def test_versions_stay_while_workers_read_them_and_all_while_that_is_unknown() -> None:
    first, second = tree_of(1, VolumeFile("a", 1, "a" * 64)), tree_of(2, VolumeFile("a", 1, "b" * 64))
    records = Records(first)
    volumes = volumes_with(records)
    volumes.inherit(["w-old"])
    assert volumes.in_use(["w-old"]) is None
    for worker, records.tree in (("w-1", first), ("w-2", second)):
        await volumes.newest(VolumeMount("models"), _REVISION, worker)
    assert volumes.in_use(["w-old", "w-1", "w-2"]) is None
    assert volumes.in_use(["w-1", "w-2"]) == {first.digest, second.digest}
    assert volumes.in_use(["w-2", "w-starting"]) == {second.digest}
    assert volumes.in_use([]) == set()


class Store:
    """Fetches files from memory."""

    def __init__(self, *files: bytes) -> None:
        self.files = {digest_of(data): data for data in files}
        self.fetched: list[str] = []

    async def fetch(self, spec: Any, file: Any, part: PartFile) -> None:
        part.restart()
        self.fetched.append(file.path)
        part.add(self.files[file.digest])


@in_loop
async def test_versions_share_equal_files_and_keep_the_right_to_execute(tmp_path: Path) -> None:
    store = Store(b"same", b"new")
    cache = WeightsCache(tmp_path / "weights", store, 1 << 20)
    same, new = (VolumeFile("d/a", 4, digest_of(b"same")), VolumeFile("run", 3, digest_of(b"new"), EXECUTABLE))
    first = await cache.get(tree_of(1, same), set)
    second = await cache.get(tree_of(2, same, new), set)
    assert store.fetched == ["d/a", "run"]
    assert (first / "d" / "a").stat().st_ino == (second / "d" / "a").stat().st_ino
    assert ((second / "run").stat().st_mode & 0o777, (second / "d" / "a").stat().st_mode & 0o777) == (0o555, 0o444)
    assert list((await cache.get(tree_of(3), set)).iterdir()) == []


@in_loop
async def test_a_file_that_is_cut_or_damaged_fails_the_start(tmp_path: Path) -> None:
    store, digest = Store(b"whole"), digest_of(b"whole")
    tree = tree_of(1, VolumeFile("a", 5, digest))
    for damaged in (b"whol", b"wh0le"):
        store.files[digest] = damaged
        with pytest.raises(ArtifactUnavailable):
            await WeightsCache(tmp_path / "weights", store, 1 << 20).get(tree, set)
    store.files[digest] = b"whole"
    path = await WeightsCache(tmp_path / "weights", store, 1 << 20).get(tree, set)
    assert (path / "a").read_bytes() == b"whole"
