"""Parking and resuming of workers: the runner's frames and reports."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import Desired, ParkedMemory, WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_core.protocol.reports import WorkerEvent, WorkerReport
from tests.runtime.runner.node import FakeWorker, Node, on_node

HELD = ParkedMemory(host_bytes=1000, device_bytes=10)


async def reported(node: Node, state: WorkerState) -> WorkerReport:
    while True:
        for worker in (await node.reports.get()).workers:
            if worker.state is state:
                return worker


async def parked(node: Node, revision: Revision) -> FakeWorker:
    worker = await node.worker(revision)
    await node.assign(revision, "w-1", desired=Desired.PARK, park_bytes=5000)
    assert await worker.next() == (frames.Park(5000), b"")
    worker.send(frames.Ready(0.0, 0.0, parked=HELD))
    assert (await reported(node, WorkerState.PARKED)).parked == HELD
    return worker


def test_a_parked_worker_gets_no_call_until_it_has_resumed(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("swap")
        worker = await parked(node, revision)
        call = node.invoke(revision)
        await node.assign(revision, "w-1")
        assert await worker.next() == (frames.Resume(), b"")
        worker.ready()
        await worker.echo(1)
        reply, _ = await call.future
        assert reply.cold_start is not None
        assert list(reply.cold_start.phases) == ["resume"]
        warm = node.invoke(revision)
        await worker.echo(1)
        assert (await warm.future)[0].cold_start is None

    on_node(url, tmp_path, test)


def test_a_worker_that_runs_a_call_receives_the_park_order_after_the_call(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("busy", concurrency=2)
        worker = await node.worker(revision)
        call = node.invoke(revision)
        run, body = await worker.run()
        await node.assign(revision, "w-1", desired=Desired.PARK)
        await reported(node, WorkerState.PARKING)
        worker.answer(run, body)
        await call.future
        frame, _ = await worker.next()
        assert isinstance(frame, frames.Park)

    on_node(url, tmp_path, test)


def test_a_park_order_that_is_withdrawn_in_time_has_no_effect(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("back", concurrency=2)
        worker = await node.worker(revision)
        first = node.invoke(revision)
        run, body = await worker.run()
        await node.assign(revision, "w-1", desired=Desired.PARK)
        await reported(node, WorkerState.PARKING)
        await node.assign(revision, "w-1")
        second = node.invoke(revision)
        await worker.echo(1)
        worker.answer(run, body)
        await asyncio.gather(first.future, second.future)

    on_node(url, tmp_path, test)


def test_a_worker_that_is_needed_again_while_it_parks_resumes_at_once(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("again")
        worker = await node.worker(revision)
        await node.assign(revision, "w-1", desired=Desired.PARK)
        assert isinstance((await worker.next())[0], frames.Park)
        await node.assign(revision, "w-1")
        worker.send(frames.Ready(0.0, 0.0, parked=HELD))
        assert await worker.next() == (frames.Resume(), b"")

    on_node(url, tmp_path, test)


def test_a_parked_worker_that_is_drained_ends(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("drained")
        worker = await parked(node, revision)
        await node.assign(revision, "w-1", desired=Desired.DRAIN)
        assert await worker.next() == (frames.Drain(), b"")

    on_node(url, tmp_path, test)


def test_a_worker_that_cannot_park_reports_the_reason_and_ends(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        node.bus.subscribe(
            subjects.WORKER_EVENTS,
            lambda message: events.put_nowait(msgspec.msgpack.decode(message.payload, type=WorkerEvent)),
        )
        revision = await node.deploy("fixed")
        worker = await node.worker(revision)
        await node.assign(revision, "w-1", desired=Desired.PARK)
        assert isinstance((await worker.next())[0], frames.Park)
        worker.send(frames.NotParked(ErrorInfo("function_start_failed", "too large"), 7000))
        assert await worker.next() == (frames.Drain(), b"")
        while (event := await events.get()).kind != "not_parked":
            pass
        assert event.failure is not None
        assert (event.failure.error.message, event.needs_bytes) == ("too large", 7000)

    on_node(url, tmp_path, test)


def test_a_worker_that_cannot_be_resumed_is_killed_and_its_call_waits_for_another(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("stuck")
        worker = await parked(node, revision)
        call = node.invoke(revision)
        await node.assign(revision, "w-1")
        assert await worker.next() == (frames.Resume(), b"")
        worker.send(frames.StartFailed("resume", ErrorInfo("function_start_failed", "CUDA out of memory")))
        assert (await node.kills.get()).worker == "w-1"
        await node.unassign("w-1")
        await (await node.worker(revision, "w-2")).echo(1)
        await call.future

    on_node(url, tmp_path, test)


def test_a_worker_that_does_not_answer_is_killed(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("silent", startup_timeout_s=0.1)
        worker = await node.worker(revision)
        await node.assign(revision, "w-1", desired=Desired.PARK)
        assert isinstance((await worker.next())[0], frames.Park)
        assert (await node.kills.get()).worker == "w-1"

    on_node(url, tmp_path, test)


def test_a_parked_worker_is_known_to_a_new_runner(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("handed")
        await node.assign(revision, "w-1", desired=Desired.PARK)
        worker = await node.connect("w-1", frames.Hello(PROTOCOL, "w-1", was_ready=True))
        worker.send(frames.Ready(0.0, 0.0, parked=HELD))
        assert (await reported(node, WorkerState.PARKED)).parked == HELD
        await node.assign(revision, "w-1")
        assert await worker.next() == (frames.Resume(), b"")
        worker.ready()
        await reported(node, WorkerState.READY)

    on_node(url, tmp_path, test)


def test_an_unrequested_parked_frame_breaks_the_protocol(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("liar")
        worker = await node.worker(revision)
        await reported(node, WorkerState.READY)
        worker.send(frames.Ready(0.0, 0.0, parked=HELD))
        assert (await node.kills.get()).worker == "w-1"

    on_node(url, tmp_path, test)
