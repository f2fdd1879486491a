"""Builds beside one that measures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gpufn_builder.identity import Target
from gpufn_builder.measurement_pause import BuildProcess, MeasurementPauses
from gpufn_builder.processes.process_messages import WAITS_TO_MEASURE, ProgressUpdate
from gpufn_core.domain.devices.engine import BuildStage
from tests.builder import bench
from tests.waiting import until_async

COMPILES = ProgressUpdate(BuildStage.COMPILE, 0.2, "tensorrt")
MEASURES = ProgressUpdate(BuildStage.MEASURE, 0.6, "tensorrt")
WAITS = ProgressUpdate(BuildStage.MEASURE, 0.6, f"tensorrt: {WAITS_TO_MEASURE}")


class Process:
    def __init__(self) -> None:
        self.is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


class Scene:
    def __init__(self, **options: Any) -> None:
        self.pauses = MeasurementPauses(**options)
        self.details: dict[str, list[str]] = {}

    def add(self, name: str) -> tuple[BuildProcess, Process]:
        process, details = Process(), self.details.setdefault(name, [])
        return self.pauses.add(name, process, lambda update: details.append(update.detail)), process


async def test_all_other_builds_pause_while_one_measures_and_name_it() -> None:
    scene = Scene()
    (first, one), (second, other) = scene.add("a.onnx"), scene.add("b.onnx")
    second.on_progress(COMPILES)
    first.on_progress(MEASURES)
    second.on_progress(ProgressUpdate(BuildStage.COMPILE, 0.3, "a late report"))
    _, new = scene.add("c.onnx")
    assert (one.is_paused, other.is_paused, new.is_paused) == (False, True, True)
    reason = "waiting for the measurement of a.onnx"
    assert scene.details["b.onnx"] == ["tensorrt", reason, reason]
    first.on_progress(COMPILES)
    assert not any(process.is_paused for process in (one, other, new))
    assert scene.details["b.onnx"][-1] == "a late report"


async def test_a_build_that_waits_to_measure_pauses_no_other() -> None:
    scene = Scene()
    (first, _), (_, other) = scene.add("a.onnx"), scene.add("b.onnx")
    first.on_progress(WAITS)
    assert not other.is_paused


async def test_a_pause_ends_with_the_build_that_measures() -> None:
    scene = Scene()
    (first, _), (_, other) = scene.add("a.onnx"), scene.add("b.onnx")
    with first:
        first.on_progress(MEASURES)
        assert other.is_paused
    assert not other.is_paused


async def test_a_build_pauses_the_others_for_a_limited_time_in_total() -> None:
    now = 0.0
    scene = Scene(most_s=1.0, clock=lambda: now)
    (first, _), (second, other) = scene.add("a.onnx"), scene.add("b.onnx")
    for _ in range(2):
        first.on_progress(MEASURES)
        now += 0.75
        first.on_progress(COMPILES)
    first.on_progress(MEASURES)
    assert not other.is_paused
    second.on_progress(MEASURES)  # the others have allowances of their own
    first.on_progress(COMPILES)
    assert scene.details["a.onnx"][-1] == "waiting for the measurement of b.onnx"


async def test_a_measurement_without_end_does_not_pause_the_others_forever() -> None:
    scene = Scene(most_s=0.01)
    (first, _), (_, other) = scene.add("a.onnx"), scene.add("b.onnx")
    first.on_progress(MEASURES)
    await until_async(lambda: not other.is_paused)


async def test_the_processes_of_a_build_are_stopped_while_another_measures(
    connect: Any, nats: Any, tmp_path: Path
) -> None:
    bus = await connect(nats)
    executor, _ = await bench.open_executor(
        await connect(nats, "builder"), tmp_path, process="tests.builder.measuring", timeout_s=600
    )
    compiles = bench.build_of(await bench.upload(bus, bench.scaled(71)))
    measures = bench.build_of(await bench.upload(bus, bench.scaled(72), max_batch=2))
    updates: list[ProgressUpdate] = []
    compiling = asyncio.create_task(executor.run(compiles, Target("cpu", ""), updates.append))
    await until_async(lambda: updates)
    (compiles_now,) = updates
    pid = compiles_now.detail
    measuring = asyncio.create_task(executor.run(measures, Target("cpu", ""), lambda update: None))
    await until_async(lambda: updates[-1].detail == "waiting for the measurement of model.onnx")
    await until_async(lambda: _state(pid) == "T")
    (tmp_path / "tuning").mkdir(exist_ok=True)
    (tmp_path / "tuning" / "measured").touch()
    await measuring
    await until_async(lambda: _state(pid) == "S")
    assert updates[-1] == compiles_now
    compiling.cancel()
    await asyncio.gather(compiling, return_exceptions=True)


def _state(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
