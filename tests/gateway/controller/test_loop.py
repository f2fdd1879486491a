"""The loop on a real nats-server, with a node that the test simulates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from gpufn_core.domain.revision import Function
from gpufn_core.domain.worker import Assignment, ColdStart, Desired, ParkedMemory, WorkerState
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import (
    ControllerReport,
    ProcessReport,
    RunnerReport,
    WaitReason,
    WorkerEvent,
    WorkerEventKind,
    WorkerReport,
)
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.controller import arrival_store
from gpufn_gateway.controller.decide.actions import Drain, Park, Resume, Start
from gpufn_gateway.controller.decide.scaling.prewarm import ArrivalHistory, slot_of
from gpufn_gateway.controller.loop import Controller
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus, Message, NotStored
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.process.clock import SystemClock
from tests.gateway.controller.simulation import GIB, assignment, function, node, revision

PARK_BYTES = 4 * GIB
_report = msgspec.msgpack.Decoder(ControllerReport)


class Stage:
    """A bus with its buckets, and a node "a" that reports but leaves its workers to the test."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.assignments: dict[str, Assignment] = {}
        self.reports: list[ControllerReport] = []
        self.changed = asyncio.Event()
        self.workers: tuple[WorkerReport, ...] = ()
        self.processes: tuple[ProcessReport, ...] = ()

    async def open(self) -> None:
        await streams.ensure_streams(self.bus)
        self.buckets = await Buckets.open(self.bus)
        self.functions, self.revisions = self.buckets.functions, self.buckets.revisions
        self.assigned = self.buckets.assignments
        await self.assigned.watch(self._on_assignment)
        self.bus.subscribe(subjects.CONTROLLER_REPORT, self._on_report)

    def controller(self, name: str = "gateway-1", bus: Bus | None = None) -> Controller:
        return Controller(bus or self.bus, self.buckets, name=name, clock=SystemClock())

    async def deploy(self, number: int = 1, scaling: ScalingPolicy | None = None) -> None:
        record = revision("f", number, scaling)
        await self.revisions.put(subjects.revision_key("f", number), encode(record))
        await self.functions.put("f", encode(function("f", 1, number)))

    def report(self) -> None:
        told = msgspec.structs.replace(node(park_bytes=PARK_BYTES), sent_at=time.time(), processes=self.processes)
        self.bus.publish(subjects.node_report("a"), encode(told))
        self.bus.publish(subjects.runner_report("a"), encode(RunnerReport("a", "r-1", time.time(), self.workers)))

    def ready(self, worker: str) -> None:
        was = self.assignments[worker]
        event = WorkerEvent(
            WorkerEventKind.READY,
            worker,
            was.function,
            was.revision,
            "a",
            time.time(),
            cold_start=ColdStart(load_s=0.02),
        )
        self.workers += (
            WorkerReport(worker, was.function, was.revision, WorkerState.READY, 1, idle_since=time.time()),
        )
        self.bus.publish(subjects.worker_event(was.function), encode(event))
        self.report()

    def parks(self, worker: str) -> None:
        """Report a worker as parked, by its runner and with the proof of its agent."""
        (was,) = self.workers
        held = ParkedMemory(GIB)
        self.workers = (msgspec.structs.replace(was, state=WorkerState.PARKED, parked=held),)
        self.processes = (ProcessReport(worker, was.function, was.revision, 1, 0.0, parked=held),)
        self.report()

    async def gone(self, worker: str) -> None:
        self.workers = tuple(report for report in self.workers if report.worker != worker)
        await self.assigned.delete(subjects.assignment_key("a", worker))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    def _on_assignment(self, key: str, entry: Entry | None) -> None:
        worker = key.rpartition(".")[2]
        if entry is None:
            self.assignments.pop(worker, None)
        else:
            self.assignments[worker] = msgspec.msgpack.decode(entry.value, type=Assignment)
        self.changed.set()

    def _on_report(self, message: Message) -> None:
        self.reports.append(_report.decode(message.payload))
        self.changed.set()


def play(nats: EmbeddedServer, scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        bus = await Bus.connect(nats.url, name="test")
        stage = Stage(bus)
        try:
            await stage.open()
            await scene(stage)
        finally:
            await bus.close()

    asyncio.run(main())


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def test_a_wakeup_becomes_an_assignment_a_deploy_moves_calls_and_idle_workers_drain(nats: EmbeddedServer) -> None:
    async def scene(stage: Stage) -> None:
        await stage.deploy()
        task = asyncio.create_task(stage.controller().run())
        await stage.until(lambda: bool(stage.reports))
        stage.report()
        await stage.bus.flush()

        stage.bus.publish(subjects.sync_queue("f", 1), b"a call")
        stage.bus.publish(subjects.wakeup("f"), b"")
        await stage.until(lambda: len(stage.assignments) == 1)
        first = next(iter(stage.assignments.values()))
        assert (first.function, first.revision, first.node, first.desired) == ("f", 1, "a", Desired.RUN)

        stage.ready(first.worker)
        await stage.until(lambda: stage.reports[-1].functions[0].workers.ready == 1)
        assert stage.reports[-1].functions[0].cold_start_s == 0.02
        await streams.purge(stage.bus, subjects.SYNC, subjects.sync_queue("f", 1))

        await stage.deploy(2, ScalingPolicy(idle_timeout_s=0.5))
        await stage.until(lambda: any(one.revision == 2 for one in stage.assignments.values()))
        second = next(one for one in stage.assignments.values() if one.revision == 2)
        stage.ready(second.worker)
        await stage.until(lambda: stage.assignments[first.worker].desired is Desired.DRAIN)
        entry = await stage.functions.get("f")
        assert entry is not None
        assert msgspec.msgpack.decode(entry.value, type=Function).serving == 2
        await stage.gone(first.worker)

        await stage.until(lambda: stage.assignments[second.worker].desired is Desired.DRAIN)
        assert "idle for" in stage.assignments[second.worker].reason
        await stage.gone(second.worker)
        await _stop(task)
        assert await stage.buckets.leases.get("controller") is None

    play(nats, scene)


def test_an_idle_worker_parks_on_request_and_a_call_resumes_it(nats: EmbeddedServer) -> None:
    async def scene(stage: Stage) -> None:
        await stage.deploy(scaling=ScalingPolicy(idle_timeout_s=0.2, park_timeout_s=60))
        task = asyncio.create_task(stage.controller().run())
        await stage.until(lambda: bool(stage.reports))
        stage.report()
        await stage.bus.flush()
        stage.bus.publish(subjects.wakeup("f"), b"")
        await stage.until(lambda: len(stage.assignments) == 1)
        (worker,) = stage.assignments
        stage.ready(worker)
        await stage.until(lambda: stage.assignments[worker].desired is Desired.PARK)
        assert stage.assignments[worker].park_bytes == PARK_BYTES

        stage.parks(worker)
        await stage.until(lambda: stage.reports[-1].functions[0].workers.parked == 1)
        stage.bus.publish(subjects.wakeup("f"), b"")
        await stage.until(lambda: stage.assignments[worker].desired is Desired.RUN)
        await stage.until(lambda: stage.reports[-1].functions[0].workers.resuming == 1)
        assert list(stage.assignments) == [worker]
        await stage.gone(worker)
        await _stop(task)

    play(nats, scene)


def test_the_record_has_the_last_request(nats: EmbeddedServer) -> None:
    async def scene(stage: Stage) -> None:
        await stage.deploy()
        controller = stage.controller()
        task = asyncio.create_task(controller.run())
        await stage.until(lambda: bool(stage.reports))
        made = msgspec.structs.replace(assignment("w"), created_at=time.time())
        await stage.assigned.put(subjects.assignment_key("a", "w"), encode(made))
        await stage.until(lambda: "w" in controller.world.workers)
        for action in (Park("w", 1, 0, "first"), Resume("w", "then"), Park("w", 2, 0, "last")):
            controller._runner.begin(action, time.monotonic())
        await stage.until(lambda: stage.assignments["w"].desired is Desired.PARK)
        await controller._runner.finish(10)
        await stage.bus.flush()
        assert (stage.assignments["w"].desired, stage.assignments["w"].park_bytes) == (Desired.PARK, 2)
        assert not controller.world.workers["w"].is_written
        await stage.gone("w")
        await _stop(task)

    play(nats, scene)


@pytest.mark.parametrize("late", [Park("w", 1, 0, "late"), Drain("w", "late")])
def test_a_write_of_a_newer_controller_is_kept(late: Park | Drain, nats: EmbeddedServer) -> None:
    async def scene(stage: Stage) -> None:
        await stage.deploy()
        controller = stage.controller()
        task = asyncio.create_task(controller.run())
        await stage.until(lambda: bool(stage.reports))
        newer = msgspec.structs.replace(assignment("w"), epoch=1 << 40, created_at=time.time())
        await stage.assigned.put(subjects.assignment_key("a", "w"), encode(newer))
        await stage.until(lambda: "w" in controller.world.workers)
        controller._runner.begin(late, time.monotonic())
        await controller._runner.finish(10)
        assert stage.assignments["w"] == newer
        assert controller.world.workers["w"].desired is Desired.RUN
        await stage.gone("w")
        await _stop(task)

    play(nats, scene)


def test_a_worker_whose_record_was_stored_is_known_though_the_answer_is_lost(
    nats: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.deploy()
        controller = stage.controller()
        task = asyncio.create_task(controller.run())
        await stage.until(lambda: bool(stage.reports))
        create = stage.assigned.create

        async def store_and_say_nothing(key: str, value: bytes) -> None:
            await create(key, value)
            raise BusUnavailable("no answer came")

        monkeypatch.setattr(stage.assigned, "create", store_and_say_nothing)
        controller._runner.begin(Start("f", 1, "a", assignment("w").share, "for this test"), time.monotonic())
        await controller._runner.finish(30)
        (worker,) = [name for name, one in stage.assignments.items() if one.reason == "for this test"]
        assert worker in controller.world.workers
        await stage.gone(worker)
        await _stop(task)

    play(nats, scene)


@pytest.mark.parametrize("bucket", ["leases", "assignments"])
def test_calls_wait_for_the_bus_to_store_again_with_that_reason(
    bucket: str, nats: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        async def store_nothing(*args: object, **options: object) -> int:
            raise NotStored("no answer came")

        await stage.deploy()
        with monkeypatch.context() as full:
            for method in ("create", "update"):
                full.setattr(getattr(stage.buckets, bucket), method, store_nothing)
            task = asyncio.create_task(stage.controller().run())
            await stage.until(lambda: bool(stage.reports))
            stage.report()
            await stage.bus.flush()
            stage.bus.publish(subjects.sync_queue("f", 1), b"a call")
            stage.bus.publish(subjects.wakeup("f"), b"")
            await stage.until(lambda: _waits_for(stage) is WaitReason.STORE)
        await stage.until(lambda: _waits_for(stage) is WaitReason.STARTING and bool(stage.assignments))
        await _stop(task)  # first: with the call queued it would start another worker, which the next test would find
        await streams.purge(stage.bus, subjects.SYNC, subjects.sync_queue("f", 1))
        for entry in await stage.assigned.entries():
            await stage.assigned.delete(entry.key)

    play(nats, scene)


def _waits_for(stage: Stage) -> WaitReason | None:
    stage.report()  # keep the node alive, however long it takes
    told = stage.reports[-1].functions
    return told[0].waiting.reason if told and told[0].waiting is not None else None


def test_a_second_controller_stands_by_and_leads_when_the_first_stops(nats: EmbeddedServer) -> None:
    async def scene(stage: Stage) -> None:
        other = await Bus.connect(nats.url, name="other")
        try:
            first = asyncio.create_task(stage.controller("first").run())
            await stage.until(lambda: bool(stage.reports))
            second = asyncio.create_task(stage.controller("second", other).run())
            await stage.until(lambda: len(stage.reports) >= 3)
            assert {report.controller for report in stage.reports} == {"first"}
            epoch = stage.reports[-1].epoch
            await _stop(first)
            await stage.until(lambda: stage.reports[-1].controller == "second")
            assert stage.reports[-1].epoch > epoch
            await _stop(second)
        finally:
            await other.close()

    play(nats, scene)


def test_a_new_leader_starts_a_worker_for_a_call_that_the_stored_arrivals_predict(
    nats: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_store, "_EVERY_S", 0.01)

    async def scene(stage: Stage) -> None:
        slot = slot_of(time.time())
        history = ArrivalHistory()
        for earlier in range(slot - 32, slot):
            # Calls in this quarter hour and the next one, because the test may run at the end of a quarter.
            history = history.record(earlier, is_call=(slot - earlier) % 4 in (0, 3))
        await stage.buckets.arrivals.put("f", history.encode())
        await stage.deploy(scaling=ScalingPolicy(prewarm=True))
        task = asyncio.create_task(stage.controller().run())
        await stage.until(lambda: bool(stage.reports))
        stage.report()
        await stage.until(lambda: len(stage.assignments) == 1)
        (assigned,) = stage.assignments.values()
        assert "a call is expected" in assigned.reason
        await _stop(task)
        await stage.gone(assigned.worker)
        await stage.buckets.arrivals.delete("f")

    play(nats, scene)
