"""A build that fails, waits or is cancelled: its error, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_builder import build_job, identity
from gpufn_builder.identity import Target
from gpufn_builder.processes.process_messages import ProgressUpdate
from gpufn_builder.store import Store
from gpufn_core.domain.devices.engine import Backend, BuildState
from gpufn_core.errors import BusUnavailable
from gpufn_core.ids import digest_of
from gpufn_core.protocol import subjects
from gpufn_core.spec.model_spec import ModelFile
from gpufn_platform.bus.storage import object_store
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import SystemClock
from tests.builder import bench, models
from tests.builder.bench import CPU, ignore, key_of, report_of
from tests.e2e.small_disk import fill, small_disk
from tests.platform.late_answers import LateAnswers
from tests.waiting import until_async


async def test_a_disk_that_is_full_publishes_nothing(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(bus, tmp_path)
    spec = await bench.upload(bus, bench.scaled(4))
    stream = f"OBJ_{subjects.ENGINE_FILES}"
    config = (await bus.js(f"STREAM.INFO.{stream}"))["config"]
    await bus.js(f"STREAM.UPDATE.{stream}", config | {"max_bytes": 1})
    try:
        ended = await executor.run(bench.build_of(spec), CPU, ignore)
    finally:
        await bus.js(f"STREAM.UPDATE.{stream}", config)
    assert ended.error is not None
    assert (ended.engines, ended.error.stage, ended.report) == ((), "publish", "")
    assert "cannot be stored: " in ended.error.message
    assert await store.find(key_of(spec)) is None
    assert (await executor.run(bench.build_of(spec), CPU, ignore)).engines == (key_of(spec),)


async def test_a_disk_with_no_room_to_build_in_fails_the_build_once(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    with small_disk(tmp_path, mebibytes=1) as disk:
        executor, _ = await bench.open_executor(bus, disk)
        spec = await bench.upload(bus, bench.scaled(4.5))
        fill(disk)
        ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert ended.error is not None
    assert ended.error.stage == "ingest"
    assert "disk is full" in ended.error.message


async def test_a_build_waits_while_the_bus_is_away(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(bus, tmp_path)
    spec = await bench.upload(bus, bench.scaled(60))
    away = dict.fromkeys(("get_file", "put_file", "put"), 1)

    def breaking_off(name: str) -> Any:
        work = getattr(object_store, name)

        async def once(*given: Any, **more: Any) -> Any:
            if away[name]:
                away[name] -= 1
                raise BusUnavailable
            return await work(*given, **more)

        return once

    monkeypatch.setattr("gpufn_builder.store._POLL_S", 0.01)
    for name in away:
        monkeypatch.setattr(object_store, name, breaking_off(name))
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert (ended.error, ended.engines, bool(ended.report)) == (None, (key_of(spec),), True)
    assert set(away.values()) == {0}


async def test_a_build_fails_if_the_bus_stays_away(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(bus, tmp_path, retry_for_s=0.0)
    spec = await bench.upload(bus, bench.scaled(61))

    async def away(*given: Any, **more: Any) -> Any:
        raise BusUnavailable

    monkeypatch.setattr(object_store, "put_file", away)
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert ended.error is not None
    assert (ended.error.stage, ended.engines) == ("publish", ())


async def test_the_error_of_a_missing_file_has_its_name(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(5))
    gone = msgspec.structs.replace(spec, files=(*spec.files, ModelFile("weights.bin", digest_of(b"gone"), 4)))
    ended = await executor.run(bench.build_of(gone), CPU, ignore)
    assert ended.error is not None
    assert ended.error.stage == "ingest"
    assert re.match(r"weights\.bin .*: g", ended.error.message)


async def test_a_file_whose_bytes_are_damaged_is_absent_once_a_build_has_met_it_so_that_it_is_put_again(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(41))
    await bench.damage_newest(bus, subjects.MODEL_FILES)
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert ended.error is not None
    assert " is damaged: " in ended.error.message
    assert not await object_store.touch(bus, subjects.MODEL_FILES, spec.files[0].digest)
    assert await bench.upload(bus, bench.scaled(41)) == spec
    assert (await executor.run(bench.build_of(spec), CPU, ignore)).error is None


async def test_a_refused_model_has_a_report_with_the_position(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    broken = models.model([models.node("NoSuchOperator", "x", "y")], [models.value("x", [1])], [models.value("y", [1])])
    spec = await bench.upload(bus, broken)
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert ended.error is not None
    assert (ended.state, ended.error.stage in ("ingest", "normalise")) == (BuildState.FAILED, True)
    assert await store.find(key_of(spec)) is None
    report = await report_of(bus, ended)
    assert (report["state"], report["error"]["message"]) == ("failed", ended.error.message)
    assert report["stages"][-1]["found"] == ended.error.message


async def test_a_build_whose_process_dies_fails_with_the_cause(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path, process="there.is.none")
    ended = await executor.run(bench.build_of(await bench.upload(bus, bench.scaled(6))), CPU, ignore)
    assert ended.error is not None
    assert " code 1: " in ended.error.message
    assert "ModuleNotFoundError" in (ended.error.traceback or "")
    assert ended.page


@pytest.mark.parametrize("has_cuda", [False, True])
async def test_a_gpu_build_without_a_gpu_engine_fails_with_the_reason_of_each_candidate(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    """Regression: the deploy succeeded, and the worker held a GPU and computed on the CPU."""
    versions = identity.installed()[Backend.ORT_CPU]
    backends = (Backend.ORT_CPU, Backend.ORT_CUDA) if has_cuda else (Backend.ORT_CPU,)
    monkeypatch.setattr(identity, "installed", lambda: dict.fromkeys(backends, versions))
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(7))
    ended = await executor.run(bench.build_of(spec, "NVIDIA L4"), Target("NVIDIA L4", "8.9", "GPU-1"), ignore)
    assert ended.engines == ()
    assert ended.error is not None
    assert "tensorrt: it is not installed here; onnxruntime-cuda: " in ended.error.message
    assert ("CUDAExecutionProvider" in ended.error.message) == has_cuda
    assert "--allow-cpu" in ended.error.message
    assert [row["backend"] for row in (await report_of(bus, ended))["candidates"]] == [
        "tensorrt",
        "onnxruntime-cuda",
    ]


async def test_candidates_that_are_not_installed_are_reported_and_the_next_is_built(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {Backend.ORT_CPU: identity.installed()[Backend.ORT_CPU]}
    monkeypatch.setattr(identity, "installed", lambda: here)
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path)
    spec = await bench.upload(bus, bench.scaled(8), allow_cpu=True)
    ended = await executor.run(bench.build_of(spec, "NVIDIA L4"), Target("NVIDIA L4", "8.9", "GPU-1"), ignore)
    assert ended.engines == (key_of(spec),)
    reasons = [(row["backend"], row["reason"]) for row in (await report_of(bus, ended))["candidates"]]
    missing = "it is not installed here"
    assert reasons == [("tensorrt", missing), ("onnxruntime-cuda", missing), ("onnxruntime-cpu", "")]


async def test_a_build_that_is_cancelled_ends_its_process_and_leaves_nothing(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, store = await bench.open_executor(
        await connect(nats, "builder"), tmp_path, process="tests.builder.hanging"
    )
    spec = await bench.upload(bus, bench.scaled(9))
    updates: list[ProgressUpdate] = []
    build = bench.build_of(spec)
    run = asyncio.create_task(executor.run(build, CPU, updates.append))
    await until_async(lambda: updates)
    assert updates[0].detail == f"in {build.id}"
    children = _children()
    assert any(b"tests.builder.hanging" in _command(pid) for pid in children)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not any(b"tests.builder.hanging" in _command(pid) for pid in children)
    assert list((tmp_path / "builds").iterdir()) == []
    assert await store.find(key_of(spec)) is None
    assert await KeyValue(bus, subjects.LEASES).get(f"build.{key_of(spec)}") is None


async def test_a_build_without_progress_ends_with_its_process_and_a_remedy(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_job, "_GRACE_S", 0.0)
    bus = await connect(nats)
    executor, _ = await bench.open_executor(
        await connect(nats, "builder"), tmp_path, process="tests.builder.hanging", timeout_s=3.0
    )
    ended = await executor.run(bench.build_of(await bench.upload(bus, bench.scaled(62))), CPU, ignore)
    assert ended.error is not None
    assert (ended.state, ended.error.stage, ended.engines) == (BuildState.FAILED, "ingest", ())
    assert "--build-timeout" in ended.error.message
    assert not any(b"tests.builder.hanging" in _command(pid) for pid in _children())
    assert list((tmp_path / "builds").iterdir()) == []


async def test_a_model_sets_the_timeout_of_its_build(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_job, "_GRACE_S", 0.0)
    bus = await connect(nats)
    executor, _ = await bench.open_executor(await connect(nats, "builder"), tmp_path, process="tests.builder.hanging")
    spec = await bench.upload(bus, bench.scaled(63), build_timeout_s=1.0)
    ended = await executor.run(bench.build_of(spec), CPU, ignore)
    assert ended.error is not None
    assert "no progress for 1 s" in ended.error.message


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


async def test_a_build_cancelled_during_its_claim_leaves_the_engine_to_the_next(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    leases = await LateAnswers.open(bus, "late-leases")
    store = Store(bus, KeyValue(bus, subjects.ENGINES), leases, SystemClock())

    async def build() -> None:
        async with store.exclusive("k" * 64, "first", lambda: None):
            raise AssertionError("it has not begun")

    task = asyncio.create_task(build())
    await leases.stored.wait()
    task.cancel()
    leases.may_answer.set()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    async with store.exclusive("k" * 64, "second", lambda: pytest.fail("it waits")):
        pass
