"""Engine cache of the node, and the engines of workers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.engine import Accuracy, Backend, EngineIdentity, EngineManifest
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.launch import WorkerConfig
from gpufn_core.spec.function_spec import spec_from_json
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Precision, TensorSpec
from gpufn_core.spec.resources import Resources
from gpufn_runtime.agent.cache.engines import EngineCache
from tests.runtime.agent.conftest import Node, Run


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest(name: str, files: dict[str, bytes]) -> EngineManifest:
    identity = EngineIdentity(
        model=name, recipe=Precision.FP32, tools={}, profiles=(), max_batch=1, samples="", flags={},
        backend=Backend.ORT_CPU, versions={}, device="cpu", compute_capability="", os="linux", arch="x86_64",
    )  # fmt: skip
    specs = (TensorSpec("x", "FP32", (1,)),)
    return EngineManifest(
        key=identity.key, identity=identity, model=f"{name}.onnx", inputs=specs, outputs=specs, profiles=(),
        batched=False, max_batch=1, settings={}, accuracy=Accuracy(0.0, 0.0, 1.0), latency=None, built_at=0.0,
        files=tuple(ModelFile(file, _digest(data), len(data)) for file, data in files.items()),
    )  # fmt: skip


class Published:
    """Engines in the object store. `fetched` are the requested digests."""

    def __init__(self, root: Path) -> None:
        self.manifests: dict[str, EngineManifest] = {}
        self.blobs: dict[str, bytes] = {}
        self.fetched: list[str] = []
        self.cache = EngineCache(root, self._find, self._fetch)

    def add(self, name: str = "m", **files: bytes) -> str:
        manifest = _manifest(name, files or {"model": b"weights", "golden": b"sample"})
        self.blobs |= {_digest(data): data for data in (files or {"": b"weights", " ": b"sample"}).values()}
        self.manifests[manifest.key] = manifest
        return manifest.key

    async def _find(self, key: str) -> EngineManifest | None:
        return self.manifests.get(key)

    async def _fetch(self, digest: str, path: Path) -> None:
        self.fetched.append(digest)
        if digest not in self.blobs:
            raise ArtifactUnavailable(f"gpufn_engine_files has no {digest[:12]}.")
        await asyncio.to_thread(path.write_bytes, self.blobs[digest])


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _run(test: Callable[[Published], Awaitable[None]], root: Path) -> None:
    async def main() -> None:
        await test(Published(root))

    asyncio.run(main())


def test_an_engine_is_fetched_once_for_all_requests(tmp_path: Path) -> None:
    async def test(bus: Published) -> None:
        key = bus.add()
        folders = await asyncio.gather(*[bus.cache.get(key) for _ in range(5)])
        assert set(folders) == {tmp_path / key}
        assert len(bus.fetched) == 2
        await bus.cache.get(key)
        assert len(bus.fetched) == 2

    _run(test, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["golden", "manifest.json", "model"]
    assert stat.S_IMODE((folder / "model").stat().st_mode) == 0o444
    assert msgspec.json.decode((folder / "manifest.json").read_bytes(), type=EngineManifest).key == folder.name


def test_engines_of_an_earlier_agent_are_checked_and_not_fetched_again(tmp_path: Path) -> None:
    async def test(bus: Published) -> None:
        await bus.cache.get(bus.add())
        assert len(bus.fetched) == expected

    expected = 2
    _run(test, tmp_path)
    expected = 0
    _run(test, tmp_path)


@pytest.mark.parametrize("how", ["cut", "changed", "removed", "no manifest", "broken manifest"])
@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_engine_is_fetched_again(how: str, known: bool, tmp_path: Path) -> None:
    async def test(bus: Published) -> None:
        key = bus.add()
        folder = await bus.cache.get(key)
        _damage(folder, how)
        if not known:
            bus.cache = EngineCache(tmp_path, bus._find, bus._fetch)
        assert await bus.cache.get(key) == folder
        assert (folder / "model").read_bytes() == b"weights"
        assert len(bus.fetched) == 4

    _run(test, tmp_path)


def test_an_engine_in_doubt_is_checked_although_it_looks_as_it_did(tmp_path: Path) -> None:
    async def test(bus: Published) -> None:
        key = bus.add()
        folder = await bus.cache.get(key)
        before = (folder / "model").stat()
        _damage(folder, "changed")
        os.utime(folder / "model", ns=(before.st_atime_ns, before.st_mtime_ns))
        await bus.cache.get(key)
        assert (folder / "model").read_bytes() == b"WEIGHTS"
        bus.cache.recheck([key, "another"])
        await bus.cache.get(key)
        assert (folder / "model").read_bytes() == b"weights"

    _run(test, tmp_path)


def _damage(folder: Path, how: str) -> None:
    path = folder / ("manifest.json" if "manifest" in how else "model")
    path.chmod(0o644)
    if how in ("removed", "no manifest"):
        path.unlink()
    elif how == "cut":
        path.write_bytes(b"weigh")
    else:
        path.write_bytes(b"WEIGHTS")


def test_an_unavailable_engine_leaves_nothing_and_is_retried(tmp_path: Path) -> None:
    async def test(bus: Published) -> None:
        key = bus.add()
        blob = bus.blobs.pop(_digest(b"sample"))
        with pytest.raises(ArtifactUnavailable, match="has no"):
            await bus.cache.get(key)
        assert _names(tmp_path) == []
        bus.blobs[_digest(b"sample")] = blob
        assert (await bus.cache.get(key)).is_dir()
        with pytest.raises(ArtifactUnavailable, match="Engine 000000000000 no longer exists"):
            await bus.cache.get("0" * 64)

    _run(test, tmp_path)


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    async def test(bus: Published) -> None:
        async def full(_digest: str, _path: Path) -> None:
            raise OSError(28, "No space left on device")

        bus.cache = EngineCache(tmp_path, bus._find, full)
        with pytest.raises(ArtifactUnavailable, match="disk is full"):
            await bus.cache.get(bus.add())
        assert _names(tmp_path) == []

    _run(test, tmp_path)


def test_unneeded_engines_are_removed_and_fetches_in_progress_are_not(tmp_path: Path) -> None:
    async def test(bus: Published) -> None:
        kept, other = bus.add("a"), bus.add("b")
        for key in (kept, other):
            await bus.cache.get(key)
        (tmp_path / ".on-its-way.1").mkdir()
        await bus.cache.keep({kept})
        assert _names(tmp_path) == [".on-its-way.1", kept]
        bus.fetched.clear()
        await bus.cache.get(kept)
        assert bus.fetched == []
        await bus.cache.get(other)
        assert len(bus.fetched) == 2
        bus.cache.sweep()
        assert _names(tmp_path) == sorted([kept, other])

    _run(test, tmp_path)


# --- through an agent ------------------------------------------------------------------------------------------------

_MODEL = ModelSpec(parameter="net", files=(ModelFile("m.onnx", "0" * 64, 1),))


def _publish(node: Node, name: str) -> str:
    data = name.encode()
    manifest = _manifest(name, {"model": data})
    node.engine_files[_digest(data)] = data
    node.engines[manifest.key] = manifest
    return manifest.key


async def _deploy(node: Node, engines: dict[str, tuple[str, ...]], number: int = 1, **options: Any) -> Revision:
    revision = await node.deploy(number=number, models=(_MODEL,), **options)
    with_engines = msgspec.structs.replace(revision, engines={"net": engines})
    await node.revisions.put(subjects.revision_key(node.function, number), encode(with_engines))
    return with_engines


def _config(node: Node, worker: str) -> WorkerConfig:
    return msgspec.json.decode((node.home.worker(worker) / "config.json").read_bytes(), type=WorkerConfig)


def test_engines_are_here_before_the_first_call_and_a_worker_gets_their_folders(on_node: Run) -> None:
    async def test(node: Node) -> None:
        keys = _publish(node, "best"), _publish(node, "next")
        await _deploy(node, {"cpu": keys, "NVIDIA L4": (_publish(node, "other"),)})
        await node.start()
        await node.until(lambda: all((node.home.engines / key).is_dir() for key in keys))
        worker = await node.assign()
        await node.event(worker, "started")
        assert _config(node, worker).engines == {"net": tuple(str(node.home.engines / key) for key in keys)}
        assert len(list(node.home.engines.iterdir())) == 2, "no engine of a device that this node lacks"

    on_node(test)


def test_a_worker_on_a_gpu_gets_the_engines_of_its_kind(on_node: Run) -> None:
    async def test(node: Node) -> None:
        key = _publish(node, "l4")
        resources = Resources(gpu=("any",))
        await _deploy(node, {"cpu": (_publish(node, "cpu"),), "NVIDIA L4": (key,)}, resources=resources)
        await node.start(gpus=(Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 1 << 30),))
        worker = await node.assign(gpu="GPU-1")
        await node.event(worker, "started")
        assert _config(node, worker).engines == {"net": (str(node.home.engines / key),)}

    on_node(test)


def test_an_engine_that_cannot_be_had_is_left_out_while_another_can(on_node: Run) -> None:
    async def test(node: Node) -> None:
        key = _publish(node, "next")
        await _deploy(node, {"cpu": ("0" * 64, key)})
        await node.start()
        worker = await node.assign()
        await node.event(worker, "started")
        assert _config(node, worker).engines == {"net": (str(node.home.engines / key),)}

    on_node(test)


@pytest.mark.parametrize(
    ("engines", "message"),
    [({}, "has no engine of net for cpu"), ({"cpu": ("0" * 64,)}, "Engine 000000000000 no longer exists")],
)
def test_without_any_engine_the_start_fails_with_the_reason(
    on_node: Run, engines: dict[str, tuple[str, ...]], message: str
) -> None:
    async def test(node: Node) -> None:
        await _deploy(node, engines)
        await node.start()
        event = await node.event(await node.assign(), "start_failed")
        assert event.failure is not None
        assert message in event.failure.error.message

    on_node(test)


def test_unused_engines_are_removed(on_node: Run) -> None:
    async def test(node: Node) -> None:
        old, new = _publish(node, "old"), _publish(node, "new")
        for stray in (node.home.engines / "stray", node.home.bundles / "stray"):
            await asyncio.to_thread(stray.mkdir, parents=True)
        first = await _deploy(node, {"cpu": (old,)})
        await node.start()
        await node.until(lambda: (node.home.engines / old).is_dir() and not (node.home.engines / "stray").exists())
        await _deploy(node, {"cpu": (new,)}, number=2, files={"app.py": "two = 2"})
        await node.until((node.home.engines / new).is_dir)
        assert (node.home.engines / old).is_dir(), "a rollback is quick"
        assert not (node.home.bundles / "stray").exists()
        await node.revisions.delete(subjects.revision_key(node.function, 1))
        await node.until(
            lambda: not (node.home.engines / old).exists() and not (node.home.bundles / first.bundle).exists()
        )
        await node.until(lambda: _names(node.home.engines) == [new])

    on_node(test)


def test_engines_of_a_deleted_function_are_removed_when_its_worker_has_ended(on_node: Run) -> None:
    async def test(node: Node) -> None:
        key = _publish(node, "m")
        revision = await _deploy(node, {"cpu": (key,)})
        await node.start()
        worker = await node.assign()
        await node.event(worker, "started")
        await node.functions.delete(node.function)
        await node.revisions.delete(subjects.revision_key(node.function, 1))
        await node.until(lambda: node.reports and node.reports[-1].processes)
        assert (node.home.bundles / revision.bundle).is_dir()
        await node.unassign(worker)
        await node.until(lambda: not (node.home.bundles / revision.bundle).exists())
        await node.until(lambda: _names(node.home.engines) == [])

    on_node(test)


@pytest.mark.parametrize(
    ("fake", "is_ready", "is_checked"),
    [
        ("exit 3", False, True),
        ("segv", False, True),
        ("sleep", False, True),  # its runner orders the kill before it has ended by itself
        ("sleep", True, False),
    ],
    ids=["it fails", "it crashes", "it is killed", "it was ready"],
)
def test_when_a_worker_does_not_get_ready_its_engines_are_checked_before_the_next(
    on_node: Run, fake: str, is_ready: bool, is_checked: bool
) -> None:
    """Change the bytes of a file, but not its size and times."""

    async def test(node: Node) -> None:
        key = _publish(node, "weights")
        await _deploy(node, {"cpu": (key,)}, fake=fake)
        file = node.home.engines / key / "model"
        await node.start()
        await node.until(file.exists)
        before = file.stat()
        file.chmod(0o644)
        file.write_bytes(b"WEIGHTS")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        first = await node.assign()
        await node.event(first, "started")
        if is_ready:
            node.runner_says({first: WorkerState.READY})
        if fake == "sleep":
            node.kill(first)
        await node.event(first, "exited")
        await node.event(await node.assign(), "started")
        assert file.read_bytes() == (b"weights" if is_checked else b"WEIGHTS")

    on_node(test)


def test_a_function_without_code_needs_no_bundle(on_node: Run) -> None:
    async def test(node: Node) -> None:
        revision = await _deploy(node, {"cpu": (_publish(node, "m"),)})
        spec = json.loads(msgspec.json.encode(revision.spec))
        spec["entry"] = {"module": "", "qualname": "", "packaging": "model"}
        without = msgspec.structs.replace(revision, number=2, bundle="", spec=spec_from_json(spec))
        await node.revisions.put(subjects.revision_key(node.function, 2), encode(without))
        await node.start()
        worker = await node.assign(revision=2)
        await node.event(worker, "started")
        assert _config(node, worker).bundle_dir == ""

    on_node(test)


def test_a_standby_of_a_function_with_models_imports_their_runtime_before_the_first_worker(on_node: Run) -> None:
    async def test(node: Node) -> None:
        await _deploy(node, {"cpu": (_publish(node, "m"),)})
        await node.start(templates=2)
        assert node.launcher is not None
        held = await node.until(lambda: [one for one in node.launcher.templates if "onnxruntime" in one])  # type: ignore[union-attr]
        assert held == ["numpy,onnxruntime"]

    on_node(test)
