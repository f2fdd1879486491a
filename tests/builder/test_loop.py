"""The builder's service: ids from the queue, and the records of builds, with a real NATS server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_builder import loop
from gpufn_builder.build_job import PROCESS, BuildExecutor
from gpufn_builder.build_record import BuildRecord
from gpufn_builder.build_slots import BuildSlots
from gpufn_builder.loop import Builder
from gpufn_builder.memory_history import MemoryHistory
from gpufn_builder.processes.process_messages import THOROUGH, MeasurePlan
from gpufn_builder.settings import BuilderSettings
from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.engine import Build, BuildStage, BuildState
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import limits, subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_platform.bus.connection import Bus, NoResponders, NotStored
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.puller import Pull
from tests.builder import bench, models
from tests.waiting import until_async


class Scene:
    """A builder of node `n`, and a client of it."""

    def __init__(
        self, bus: Bus, builds: KeyValue, executor: BuildExecutor, builder: Builder, admissions: list[int]
    ) -> None:
        """`admissions` grows with each build that the builder may admit."""
        self.admissions = admissions
        self.bus = bus
        self.builds = builds
        self.executor = executor
        self.seen: list[Build] = []
        self._builder = builder
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, bus: Bus, builders: Bus, folder: Path, *, process: str = PROCESS, available_bytes: int = 64 << 30
    ) -> Scene:
        """`bus` is the client's connection."""
        executor, _ = await bench.open_executor(builders, folder, process=process)
        builds = KeyValue(builders, subjects.BUILDS)
        admissions: list[int] = []

        def available() -> int:
            admissions.append(available_bytes)
            return available_bytes

        slots = BuildSlots(
            most=2,
            limit_bytes=8 << 30,
            history=MemoryHistory(folder / "memory.json"),
            available=available,
        )
        builder = Builder(builders, builds=builds, executor=executor, slots=slots, node="n", clock=SystemClock())
        return cls(bus, KeyValue(bus, subjects.BUILDS), executor, builder, admissions)

    def start(self) -> None:
        self._task = asyncio.create_task(self._builder.run())

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self._task

    async def ask(self, spec: ModelSpec, device: str = "cpu", **fields: Any) -> Build:
        """Request a build, as the gateway does."""
        build = msgspec.structs.replace(bench.build_of(spec, device), **fields)
        await self.builds.create(build.id, encode(build))
        await self.builds.watch(self._on_change, prefix=build.id)
        await self.bus.publish_stored(subjects.build_queue(device), build.id.encode(), msg_id=build.id)
        return build

    async def cancel(self, build: Build | None = None) -> None:
        entry = await self.builds.get((build or self.last).id)
        assert entry is not None
        build = msgspec.msgpack.decode(entry.value, type=Build)
        await self.builds.put(build.id, encode(msgspec.structs.replace(build, cancel=True)))

    async def ended(self) -> Build:
        await until_async(lambda: self.seen and self.last.state.ended)
        return self.last

    async def queued(self) -> int:
        """The number of ids that are not acknowledged."""
        await self.bus.flush()
        return int((await self.bus.js(f"STREAM.INFO.{subjects.BUILD}"))["state"]["messages"])

    async def until_acked(self) -> None:
        while await self.queued():
            pass

    def now(self, build: Build) -> Build:
        """The newest state of a build."""
        return next((each for each in reversed(self.seen) if each.id == build.id), build)

    @property
    def last(self) -> Build:
        return self.seen[-1]

    def _on_change(self, key: str, entry: Entry | None) -> None:
        if entry is not None:
            self.seen.append(msgspec.msgpack.decode(entry.value, type=Build))


async def test_a_build_is_taken_kept_up_to_date_and_ended(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path)
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(2)))
    build = await scene.ended()
    assert (build.state, build.error, build.progress, build.cached) == (BuildState.SUCCEEDED, None, 1.0, False)
    assert len(build.engines) == 1
    assert build.report != ""
    assert build.page != ""
    assert build.started_at is not None
    assert build.ended_at is not None
    assert build.started_at <= build.ended_at
    assert {each.state for each in scene.seen} == {BuildState.PENDING, BuildState.BUILDING, BuildState.SUCCEEDED}
    assert {each.stage for each in scene.seen} & set(BuildStage)
    await scene.until_acked()
    await scene.stop()


async def test_the_next_build_follows_a_failed_one(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path)
    scene.start()
    proto = bench.scaled(3)
    proto.graph.node[0].domain = "elsewhere"
    await scene.ask(await bench.upload(scene.bus, proto))
    failed = await scene.ended()
    assert (failed.state, failed.error and failed.error.code) == (BuildState.FAILED, "build_failed")
    await scene.ask(await bench.upload(scene.bus, bench.scaled(2)))
    await until_async(lambda: scene.last.id != failed.id)
    assert (await scene.ended()).state is BuildState.SUCCEEDED
    await scene.stop()


async def test_a_build_runs_beside_one_that_does_not_end(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(
        await connect(nats), await connect(nats, "builder"), tmp_path, process="tests.builder.sometimes_hanging"
    )
    scene.start()
    endless = await scene.ask(await bench.upload(scene.bus, bench.scaled(71), max_batch=2))
    await until_async(lambda: scene.now(endless).stage is BuildStage.INGEST)
    other = await scene.ask(await bench.upload(scene.bus, bench.scaled(72)))
    await until_async(lambda: scene.now(other).state.ended)
    assert scene.now(endless).state is BuildState.BUILDING
    await scene.cancel(endless)
    await until_async(lambda: scene.now(endless).state is BuildState.CANCELLED)
    await scene.until_acked()
    await scene.stop()


async def test_a_build_without_memory_waits_for_the_other_to_end(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_HANDED_BACK_S", 0.01)
    monkeypatch.setattr(loop, "_RETRY_S", 0.02)
    scene = await Scene.open(
        await connect(nats),
        await connect(nats, "builder"),
        tmp_path,
        process="tests.builder.sometimes_hanging",
        available_bytes=0,
    )
    scene.start()
    endless = await scene.ask(await bench.upload(scene.bus, bench.scaled(73), max_batch=2))
    await until_async(lambda: scene.now(endless).stage is BuildStage.INGEST)
    other = await scene.ask(await bench.upload(scene.bus, bench.scaled(74)))
    await until_async(lambda: len(scene.admissions) > 1)
    assert scene.now(other).state is BuildState.PENDING
    await scene.cancel(endless)
    await until_async(lambda: scene.now(other).state.ended)
    assert scene.now(other).deaths == 0
    await scene.until_acked()
    await scene.stop()
    history = MemoryHistory(tmp_path / "memory.json")
    assert (history.get(endless), (history.get(other) or 0) > 0) == (None, True)


async def test_of_an_error_that_is_longer_than_any_message_the_record_has_the_beginning(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path)
    scene.start()
    proto = models.mlp()
    proto.graph.node[0].domain = "elsewhere"
    proto.graph.node[0].name = "n" * limits.MESSAGE_BYTES
    await scene.ask(await bench.upload(scene.bus, proto))
    error = (await scene.ended()).error
    assert error is not None
    assert error.message.startswith("node nnn")
    assert error.node is not None
    assert error.node.startswith("nnn")
    assert max(len(error.message), len(error.node)) <= 1000
    await scene.until_acked()
    await scene.stop()


async def test_setting_cancel_ends_a_build(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(
        await connect(nats), await connect(nats, "builder"), tmp_path, process="tests.builder.hanging"
    )
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(4)))
    await until_async(lambda: scene.seen and scene.last.stage is BuildStage.INGEST)
    await scene.cancel()
    build = await scene.ended()
    assert (build.state, build.engines, build.error) == (BuildState.CANCELLED, (), None)
    await scene.until_acked()
    assert list((tmp_path / "builds").iterdir()) == []
    await scene.stop()


async def test_a_build_cancelled_before_it_began_is_not_begun(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path, process="there.is.none")
    await scene.ask(await bench.upload(scene.bus, bench.scaled(5)), cancel=True)
    scene.start()
    assert (await scene.ended()).state is BuildState.CANCELLED
    await scene.stop()


async def test_an_ended_build_is_acknowledged_and_not_changed(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path, process="there.is.none")
    spec = await bench.upload(scene.bus, bench.scaled(6))
    asked = await scene.ask(spec, state=BuildState.SUCCEEDED, engines=("e" * 64,))
    gone = await scene.ask(spec)
    await scene.builds.delete(gone.id)
    scene.start()
    await scene.until_acked()
    assert {each for each in scene.seen if each.id == asked.id} == {asked}
    await scene.stop()


async def test_a_builder_that_stops_releases_its_build_to_the_next(connect: Any, nats: Any, tmp_path: Path) -> None:
    first = await Scene.open(
        await connect(nats), await connect(nats, "builder"), tmp_path / "a", process="tests.builder.hanging"
    )
    first.start()
    await first.ask(await bench.upload(first.bus, bench.scaled(7)))
    await until_async(lambda: first.seen and first.last.stage is BuildStage.INGEST)
    await first.stop()
    await until_async(lambda: first.last.state is BuildState.PENDING)
    second = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path / "b")
    second.start()
    assert (await first.ended()).state is BuildState.SUCCEEDED
    await second.stop()


@pytest.mark.parametrize("left", [{"deaths": 5}, {"deaths": 4, "state": BuildState.BUILDING, "builder": "n/dead"}])
async def test_a_build_that_kills_its_builders_is_abandoned(
    connect: Any, nats: Any, tmp_path: Path, left: dict[str, Any]
) -> None:
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path, process="there.is.none")
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(8)), **left)
    build = await scene.ended()
    assert build.error is not None
    assert build.state is BuildState.FAILED
    assert "started 5 times" in build.error.message
    await scene.stop()


async def test_a_redelivered_build_counts_no_death(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path)
    asked = await scene.ask(await bench.upload(scene.bus, bench.scaled(11)))
    queue = subjects.BUILD, subjects.build_consumer("cpu")
    await streams.ensure_consumer(
        scene.bus, *queue, subjects.build_queue("cpu"), ack_wait_s=30, max_ack_pending=-1
    )  # fmt: skip
    came: list[int] = []

    def release(delivery: Delivery) -> None:
        came.append(delivery.delivered)
        delivery.nak()
        if len(came) < 9:
            pull.grant(1)

    pull = Pull(scene.bus, *queue, release)
    pull.grant(1)
    await until_async(lambda: len(came) == 9)
    pull.withdraw()
    scene.start()
    build = await scene.ended()
    assert (build.id, build.state, build.deaths) == (asked.id, BuildState.SUCCEEDED, 0)
    await scene.stop()


async def test_a_bus_that_disconnects_repeatedly_uses_up_no_attempts(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_RETRY_S", 0.01)
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path)
    run, away = scene.executor.run, [BusUnavailable("it is away")] * 9

    async def sometimes(*given: Any) -> Any:
        if away:
            raise away.pop()
        return await run(*given)

    monkeypatch.setattr(scene.executor, "run", sometimes)
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(12)))
    build = await scene.ended()
    assert (build.state, build.deaths, away) == (BuildState.SUCCEEDED, 0, [])
    await scene.stop()


async def test_a_build_interrupted_by_a_full_disk_reports_it_and_the_log_has_no_traceback(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "_RETRY_S", 0.01)
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path)
    run, full = scene.executor.run, [NotStored("no answer came: its disk may be full")]

    async def then_full(*given: Any) -> Any:
        if full:
            raise full.pop()
        return await run(*given)

    monkeypatch.setattr(scene.executor, "run", then_full)
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(29)))
    assert (await scene.ended()).state is BuildState.SUCCEEDED
    assert any("disk was full" in build.detail for build in scene.seen)
    [line] = [record for record in caplog.records if "was interrupted" in record.message]
    assert "disk may be full" in line.message.rpartition("retried: ")[2]
    assert line.exc_info is None
    await scene.stop()


async def test_a_fault_of_the_builder_ends_the_build_with_its_cause(
    connect: Any, nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path)

    async def faulty(*_: Any) -> Any:
        raise KeyError("backend")

    monkeypatch.setattr(scene.executor, "run", faulty)
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(13)))
    build = await scene.ended()
    assert build.error is not None
    assert build.state is BuildState.FAILED
    assert build.error.message.endswith("KeyError: 'backend'")
    await scene.until_acked()
    await scene.stop()


async def test_a_build_that_another_builder_claimed_is_left_to_it(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(
        await connect(nats), await connect(nats, "builder"), tmp_path, process="tests.builder.hanging"
    )
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(14)))
    await until_async(lambda: scene.seen and scene.last.stage is BuildStage.INGEST)
    other = await BuildRecord.claim(scene.builds, scene.last.id, "other/1", 0.0)
    await until_async(
        lambda: (scene.last.builder, scene.last.deaths) == ("other/1", 0)
    )  # the first one reports that it is alive
    assert list((tmp_path / "builds").iterdir()) == []
    assert await scene.queued() == 1
    await other.change(state=BuildState.SUCCEEDED, engines=("e" * 64,))
    await scene.stop()
    assert (scene.last.state, scene.last.engines) == (BuildState.SUCCEEDED, ("e" * 64,))


async def test_a_build_that_ended_elsewhere_keeps_its_end(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(
        await connect(nats), await connect(nats, "builder"), tmp_path, process="tests.builder.hanging"
    )
    # An earlier test may have left a build, which the bus redelivers after a while.
    await scene.bus.js(f"STREAM.PURGE.{subjects.BUILD}")
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(15)))
    await until_async(lambda: scene.seen and scene.last.stage is BuildStage.INGEST)
    ended = msgspec.structs.replace(scene.last, state=BuildState.FAILED, detail="ended by hand")
    await scene.builds.put(ended.id, encode(ended))
    await scene.until_acked()
    await scene.stop()
    assert scene.last == ended


async def test_a_builder_answers_for_its_device_also_while_it_builds(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(
        await connect(nats), await connect(nats, "builder"), tmp_path, process="tests.builder.hanging"
    )
    gateway = await connect(nats, "gateway")
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(16)))
    await until_async(lambda: scene.seen and scene.last.stage is BuildStage.INGEST)
    await gateway.request(subjects.builders("cpu"), timeout_s=30)
    await scene.cancel()
    await scene.ended()
    await scene.stop()
    await scene.bus.flush()
    with pytest.raises(NoResponders):
        await gateway.request(subjects.builders("cpu"), timeout_s=30)


async def test_the_gpus_of_its_node_get_queues_of_their_own(connect: Any, nats: Any, tmp_path: Path) -> None:
    scene = await Scene.open(await connect(nats), await connect(nats, "builder"), tmp_path)
    scene.start()
    await scene.ask(await bench.upload(scene.bus, bench.scaled(2), allow_cpu=True), "NVIDIA L4")
    cpu = Device("cpu", DeviceType.CPU, "cpu", 1 << 30, cores=2.0)
    gpu = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 24 << 30, compute_capability="8.9")
    agent = await connect(nats, "agent")
    agent.publish(subjects.node_report("other"), encode(NodeReport("other", 1.0, (cpu,))))
    agent.publish(subjects.node_report("n"), encode(NodeReport("n", 1.0, (cpu, gpu))))
    build = await scene.ended()
    assert (build.device, build.state) == ("NVIDIA L4", BuildState.SUCCEEDED)
    await scene.stop()


async def test_the_service_is_small_and_stops_on_a_signal(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    scene = await Scene.open(bus, await connect(nats, "builder"), tmp_path)
    root = str(Path(__file__).parents[2])
    environ = {
        "GPUFN_NATS_URL": nats.url_for("builder"),
        "GPUFN_HOME": str(tmp_path / "home"),
        "GPUFN_NODE": "n",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    service = _started(environ)
    try:
        refused = models.model([models.node("NoSuch", "x", "y")], [models.value("x", [1])], [models.value("y", [1])])
        await scene.ask(await bench.upload(bus, refused))
        build = await scene.ended()
        assert (build.state, "NoSuch" in (build.error.message if build.error else "")) == (BuildState.FAILED, True)
        loaded, resident_bytes = _memory(service.pid)
        assert not [name for name in ("onnx", "numpy", "ml_dtypes") if f"/{name}" in loaded]
        assert resident_bytes < 45 << 20
    finally:
        service.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.wait, 30) == 0


def _started(environ: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "gpufn_builder"], env=os.environ | environ)


def _memory(pid: int) -> tuple[str, int]:
    """The mapped files, and the resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return Path(f"/proc/{pid}/maps").read_text(), int(resident.split()[1]) << 10


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_name_the_variable_that_is_wrong() -> None:
    given = {"GPUFN_NATS_URL": "nats://h", "GPUFN_BUILD_MEMORY": "2Gi"}
    assert BuilderSettings.from_env(given).memory_limit_bytes == 2 << 30
    assert BuilderSettings.from_env({"GPUFN_NATS_URL": "nats://h"}).memory_limit_bytes > 1 << 28
    assert BuilderSettings.from_env(given).measuring == THOROUGH
    quick = BuilderSettings.from_env(given | {"GPUFN_BUILD_MEASURE": "1.5"}).measuring
    assert quick == MeasurePlan(warm_up_s=0.1, least_s=1.5, most_s=6.0, trial_s=0.125)
    assert BuilderSettings.from_env(given | {"GPUFN_BUILD_RETRY": "0.5"}).retry_for_s == 0.5
    timeouts = [BuilderSettings.from_env(given | more).timeout_s for more in ({}, {"GPUFN_BUILD_TIMEOUT": "60"})]
    assert timeouts == [600.0, 60.0]
    assert BuilderSettings.from_env(given).builds >= 2
    assert BuilderSettings.from_env(given | {"GPUFN_BUILDS": "3"}).builds == 3
    for change in (
        {"GPUFN_NATS_URL": ""},
        {"GPUFN_NODE": "A node"},
        {"GPUFN_BUILD_MEMORY": "much"},
        {"GPUFN_BUILD_MEMORY": "16"},
        {"GPUFN_BUILD_MEASURE": "long"},
        {"GPUFN_BUILD_MEASURE": "nan"},
        {"GPUFN_BUILD_MEASURE": "601"},
        {"GPUFN_BUILD_RETRY": "soon"},
        {"GPUFN_BUILD_TIMEOUT": "0.5"},
        {"GPUFN_BUILDS": "0"},
    ):
        with pytest.raises(InvalidSetting, match=next(iter(change))):
            BuilderSettings.from_env(given | change)
