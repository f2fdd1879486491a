"""Removal of unused artifacts from a node's cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.revision import Function, Revision
from gpufn_core.ids import Digest, digest_of
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_runtime.agent.bytecode.background import OWN_VERSION
from gpufn_runtime.agent.cache.bundles import BundleCache, unpack
from gpufn_runtime.agent.cache.prefetch import Prefetch
from tests.waiting import until_async

NO_FILES = b"PK\x05\x06" + bytes(18)  # an empty zip archive
_L4 = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 1 << 30)


class Bucket:
    async def watch(self, on_change: Callable[[str, Entry | None], None]) -> None:
        self.on_change = on_change


class Bundles:
    """Call `meanwhile` while unused artifacts are being removed, which may take seconds."""

    meanwhile: Callable[[], None]

    def find(self, digest: str) -> Path:
        return Path(digest)

    async def keep(self, digests: Container[str]) -> None:
        self.meanwhile()


class Engines:
    def __init__(self) -> None:
        self.kept: asyncio.Future[set[str]] = asyncio.get_running_loop().create_future()

    async def keep(self, keys: set[str]) -> None:
        self.kept.set_result(keys)


def _deploy(functions: Bucket, revisions: Bucket, name: str, *, bundle: str = digest_of(b""), **options: Any) -> None:
    revision = Revision(
        function=name,
        number=1,
        spec=FunctionSpec(name=name, entry=EntryPoint("app", "f"), methods=(MethodSpec(),), **options),
        bundle=Digest(bundle),
        created_at=1.0,
        engines={"model": {"cpu": (f"engine of {name}",)}},
    )
    function = Function(name=name, active=1, serving=1, latest=1, updated_at=1.0)
    revisions.on_change(f"{name}.1", Entry(f"{name}.1", encode(revision), 1))
    functions.on_change(name, Entry(name, encode(function), 1))


async def kept_engines() -> set[str]:
    """One function exists before; a second one is deployed while the cache is being cleared."""
    functions, revisions, bundles, engines = Bucket(), Bucket(), Bundles(), Engines()

    def deploy(name: str) -> None:
        _deploy(functions, revisions, name)

    stubs: dict[str, Any] = {
        "functions": functions, "revisions": revisions, "bundles": bundles, "engines": engines, "weights": Mock(),
        "signatures": Mock(),
    }  # fmt: skip
    prefetch = Prefetch(
        **stubs, gpus=(), launcher=Mock(), running=lambda: (), image_of=lambda spec: None, limits_of=Mock()
    )
    await prefetch.watch()
    deploy("there-before")
    bundles.meanwhile = lambda: deploy("new")
    task = asyncio.create_task(prefetch.run())
    try:
        async with asyncio.timeout(30):
            return await engines.kept
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_files_deployed_while_the_cache_is_cleared_stay() -> None:
    """A worker that was being launched lost its engine."""
    assert asyncio.run(kept_engines()) == {"engine of there-before", "engine of new"}


@pytest.mark.parametrize(("gpus", "modules"), [((), {"a"}), ((_L4,), {"a", "b"})])
def test_a_node_without_gpus_prepares_no_template_for_gpu_functions(
    gpus: tuple[Device, ...], modules: set[str]
) -> None:
    """Regression: it took one of the few templates, with a second copy of torch."""

    async def run() -> set[str]:
        functions, revisions, launcher, bundles = Bucket(), Bucket(), Mock(), Bundles()
        bundles.meanwhile = lambda: None
        stubs: dict[str, Any] = {
            "functions": functions, "revisions": revisions, "bundles": bundles, "engines": Engines(),
            "weights": Mock(), "signatures": Mock(),
        }  # fmt: skip
        prefetch = Prefetch(
            **stubs, gpus=gpus, launcher=launcher, running=lambda: (), image_of=lambda spec: None,
            limits_of=Mock(),
        )  # fmt: skip
        await prefetch.watch()
        _deploy(functions, revisions, "cpu", modules=("a",))
        _deploy(functions, revisions, "gpu", modules=("b",), resources=Resources(gpu=("any",)))
        task = asyncio.create_task(prefetch.run())
        await until_async(lambda: launcher.set_uses.call_args)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        uses, _ = launcher.set_uses.call_args.args
        return {module for use in uses for module in use.modules}

    assert asyncio.run(run()) == modules


def _weights(name: str) -> WeightsSpec:
    return WeightsSpec(source=name, files=(WeightsFile("w", 1, digest_of(name.encode())),))


@pytest.mark.parametrize(
    ("running", "in_use"), [(set(), set()), ({("cpu", 1)}, {_weights("cpu").digest}), ({("deleted", 1)}, None)]
)
def test_weights_are_prefetched_where_the_function_could_run(
    running: set[tuple[str, int]], in_use: set[str] | None
) -> None:
    """A prefetch keeps the weights of all deployed functions. It removes none while a worker's weights are unknown."""

    async def run() -> None:
        functions, revisions, launcher, bundles, weights = Bucket(), Bucket(), Mock(), Bundles(), Mock()
        bundles.meanwhile = lambda: None
        stubs: dict[str, Any] = {
            "functions": functions, "revisions": revisions, "bundles": bundles, "engines": Engines(),
            "weights": weights, "signatures": Mock(),
        }  # fmt: skip
        prefetch = Prefetch(
            **stubs, gpus=(_L4,), launcher=launcher, running=lambda: running, image_of=lambda spec: None,
            limits_of=Mock(),
        )  # fmt: skip
        prefetched: list[str] = []
        weights.prefetch = lambda specs, in_use: prefetched.extend(spec.source for spec in specs)
        await prefetch.watch()
        for name, gpu in (("cpu", ()), ("l4", ("H100", "L4")), ("h100", ("H100",))):
            _deploy(functions, revisions, name, weights=(_weights(name),), resources=Resources(gpu=gpu))
        task = asyncio.create_task(prefetch.run())
        await until_async(lambda: prefetched)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert sorted(prefetched) == ["cpu", "l4"]
        assert prefetch._weights_in_use() == in_use
        if in_use is not None:
            assert prefetch._weights_deployed() == {_weights(name).digest for name in ("cpu", "l4", "h100")}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("image", "version"),
    [(None, OWN_VERSION), (ImageSpec(python="3.99"), "3.99"), (ImageSpec(base="debian"), None)],
    ids=["agent's Python", "another Python", "unknown Python"],
)
def test_a_bundle_is_compiled_for_the_python_of_its_workers(
    image: ImageSpec | None, version: str | None, tmp_path: Path
) -> None:
    async def run() -> list[tuple[Path, str]]:
        functions, revisions, engines = Bucket(), Bucket(), Engines()
        stubs: dict[str, Any] = {
            "functions": functions, "revisions": revisions, "engines": engines, "weights": Mock(),
            "signatures": Mock(),
        }  # fmt: skip
        requests: list[tuple[Path, str]] = []
        unpack(NO_FILES, digest_of(NO_FILES), tmp_path)
        prefetch = Prefetch(
            **stubs, bundles=BundleCache(tmp_path, Mock()), gpus=(), launcher=Mock(), running=lambda: (),
            image_of=lambda spec: image, limits_of=Mock(),
            compile_later=lambda bytecode, version: requests.append((bytecode.bundle, version)),
        )  # fmt: skip
        await prefetch.watch()
        _deploy(functions, revisions, "cpu", bundle=digest_of(NO_FILES))
        _deploy(functions, revisions, "gpu", bundle=digest_of(NO_FILES), resources=Resources(gpu=("any",)))
        task = asyncio.create_task(prefetch.run())
        await engines.kept
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return requests

    expected = [] if version is None else [(tmp_path / digest_of(NO_FILES), version)]
    assert asyncio.run(run()) == expected
