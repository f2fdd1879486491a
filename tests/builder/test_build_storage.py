"""The files and the manifest of an engine: stored whole, once, and again if they are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.errors import ArtifactUnavailable, BuildFailed
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.model_spec import ModelFile
from gpufn_platform.bus.storage import object_store
from tests import blobs
from tests.builder import bench
from tests.builder.bench import CPU, ignore, key_of


async def _engine_files(bus: Any) -> set[str]:
    return {blob.digest for blob in await object_store.blobs(bus, subjects.ENGINE_FILES)}


async def test_files_of_an_earlier_builder_are_swept(connect: Any, nats: Any, tmp_path: Path) -> None:
    executor, _ = await bench.open_executor(await connect(nats), tmp_path)
    left = tmp_path / "builds" / "01abc" / "model"
    left.mkdir(parents=True)
    executor.sweep()
    assert not left.exists()


async def test_a_manifest_is_never_replaced(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(10))
    await executor.run(bench.build_of(spec), CPU, ignore)
    first = await store.find(key_of(spec))
    assert first is not None
    for file in first.files:
        await object_store.get_file(bus, subjects.ENGINE_FILES, file.digest, tmp_path / file.name)
    later = msgspec.structs.replace(first, built_at=first.built_at + 1)
    assert await store.publish(later, tmp_path) == await store.find(key_of(spec)) == first


async def test_an_engine_whose_files_are_others_than_its_manifest_names_is_not_published(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(11))
    await executor.run(bench.build_of(spec), CPU, ignore)
    first = await store.find(key_of(spec))
    assert first is not None
    reports = await _engine_files(bus) - {file.digest for file in first.files}
    for file in first.files:
        (tmp_path / file.name).write_bytes(bytes(file.size))
    with pytest.raises(BuildFailed, match=r"cannot be stored: model\.onnx .*digest"):
        await store.publish(msgspec.structs.replace(first, key="0" * 64), tmp_path)
    assert await store.find("0" * 64) is None
    assert await _engine_files(bus) == {file.digest for file in first.files} | reports


async def test_an_engine_that_cannot_be_stored_whole_leaves_none_of_its_files(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(14))

    before = await _engine_files(bus)

    async def refused(key: str, value: bytes) -> int:
        raise ArtifactUnavailable("insufficient storage resources available")

    monkeypatch.setattr(store._engines, "create", refused)
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert ended.error is not None
    assert ended.error.stage == "publish"
    assert await _engine_files(bus) - before == {ended.report, ended.page}


async def test_a_file_that_was_collected_before_its_manifest_was_there_is_put_again(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(12))
    create = store._engines.create

    async def collected_before(key: str, value: bytes) -> int:
        for file in msgspec.msgpack.decode(value, type=EngineManifest).files:
            await blobs.delete(bus, subjects.ENGINE_FILES, file.digest)
        return await create(key, value)

    monkeypatch.setattr(store._engines, "create", collected_before)
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    manifest = await store.find(ended.engines[0])
    assert manifest is not None
    for file in manifest.files:
        assert await blobs.exists(bus, subjects.ENGINE_FILES, file.digest)


async def test_an_engine_that_lost_a_file_is_built_again(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(13))
    await executor.run(bench.build_of(spec), CPU, ignore)
    manifest = await store.find(key_of(spec))
    assert manifest is not None
    await blobs.delete(bus, subjects.ENGINE_FILES, manifest.files[0].digest)
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert (ended.engines, ended.cached, ended.error) == ((key_of(spec),), False, None)
    manifest = await store.find(key_of(spec))
    assert manifest is not None
    for file in manifest.files:
        assert await blobs.exists(bus, subjects.ENGINE_FILES, file.digest)


async def test_an_engine_replaces_one_that_lost_a_file_during_the_build(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(14))
    await executor.run(bench.build_of(spec), CPU, ignore)
    ours = await store.find(key_of(spec))
    assert ours is not None
    for file in ours.files:
        await object_store.get_file(bus, subjects.ENGINE_FILES, file.digest, tmp_path / file.name)
    lost = ModelFile("model.onnx", "0" * 64, 1)
    entry = await store._engines.get(ours.key)
    assert entry is not None
    await store._engines.update(ours.key, encode(msgspec.structs.replace(ours, files=(lost,))), entry.revision)
    assert await store.publish(ours, tmp_path) == ours == await store.find(ours.key)
