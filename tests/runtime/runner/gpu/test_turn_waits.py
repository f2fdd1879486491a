"""Calls that wait for a turn on a GPU: lookups, and their end if the turn never comes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import Desired, WorkerState
from gpufn_core.protocol import frames
from gpufn_core.protocol.messages import CallLocation
from gpufn_platform.queue.records import call_records
from tests.runtime.runner.node import FakeWorker, Node, on_node
from tests.runtime.runner.workers.test_nested_calls import call_of

ON_GPU = DeviceShare(cpu_device="cpu", cores=0.1, memory_bytes=1 << 20, gpus=("GPU-0",), mode=Share.TIME)


async def contended(node: Node) -> tuple[Revision, FakeWorker, frames.Run, Revision, FakeWorker]:
    """A call of "busy" has the only turn, and "other" has a worker on the same GPU."""
    busy, other = await node.deploy("busy"), await node.deploy("other")
    first, second = await node.worker(busy, "w-1", ON_GPU), await node.worker(other, "w-2", ON_GPU)
    await both_ready(node)
    node.invoke(busy)
    run, _ = await first.run()
    return busy, first, run, other, second


async def both_ready(node: Node) -> None:
    """A call that begins before a second function arrives needs no turn."""
    while [worker.state for worker in (await node.reports.get()).workers] != [WorkerState.READY] * 2:
        pass


async def waiting(node: Node, invocation: str) -> CallLocation:
    while True:
        held = await call_records.locate(node.bus, invocation)
        if held is not None and held.waits_on:
            return held


def test_a_call_waits_for_its_turn_and_reports_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        _, first, run, other, second = await contended(node)
        call = await node.submit(other, b"1")
        held = await waiting(node, call.id)
        assert (held.waits_on, held.worker, held.started_at) == ("GPU-0", "w-2", 0.0)
        while not any(worker.waits_on == "GPU-0" for worker in (await node.reports.get()).workers):
            pass
        first.answer(run)
        begun, _ = await second.run()
        second.answer(begun, b"2")
        record, result = await call_records.wait(node.bus, call.id, 10)
        assert (record.state, result, record.attempt) == (InvocationState.SUCCEEDED, b"2", 1)

    on_node(url, tmp_path, test)


def test_a_call_is_sent_to_a_worker_that_need_not_wait_if_there_is_one(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        *_, other, _ = await contended(node)
        elsewhere = await node.worker(other, "w-3")
        await node.report_of("w-3", WorkerState.READY)
        call = node.invoke(other, b"1")
        run, _ = await elsewhere.run()
        elsewhere.answer(run, b"2")
        assert (await call.future)[1] == b"2"

    on_node(url, tmp_path, test)


def test_a_cancelled_call_never_begins(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        _, first, run, other, second = await contended(node)
        cancelled = await node.submit(other, b"1")
        await waiting(node, cancelled.id)
        assert await call_records.cancel(node.bus, cancelled, node.clock.time())
        kept = await node.submit(other, b"2")
        first.answer(run)
        _, body = await second.run()
        assert body == b"2"
        assert kept.id != cancelled.id

    on_node(url, tmp_path, test)


def test_a_call_expires_while_it_waits(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        _, first, run, other, second = await contended(node)
        reply, _ = await node.invoke(other, b"1", timeout_s=0.3).future
        assert reply.kind is OutcomeKind.EXPIRED
        later = node.invoke(other, b"2")
        first.answer(run)
        begun, body = await second.run()
        assert body == b"2"
        second.answer(begun, b"3")
        assert (await later.future)[1] == b"3"

    on_node(url, tmp_path, test)


def test_a_call_whose_worker_dies_while_it_waits_runs_elsewhere(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        *_, other, second = await contended(node)
        call = await node.submit(other, b"1")
        await waiting(node, call.id)
        second.die()
        third = await node.worker(other, "w-3")
        run, body = await third.run()
        assert (body, run.number) == (b"1", 1)
        third.answer(run, b"2")
        assert (await call_records.wait(node.bus, call.id, 10))[0].state is InvocationState.SUCCEEDED

    on_node(url, tmp_path, test)


def test_a_call_that_waits_for_a_turn_of_a_dying_worker_has_not_run_there(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        first = await node.deploy("first", concurrency=2)
        second = await node.deploy("second")
        worker = await node.worker(first, "w-1", ON_GPU)
        await node.worker(second, "w-2", ON_GPU)
        await both_ready(node)
        running = node.invoke(first, b"1")
        await worker.run()
        node.turns_clock.skipped_s = 1.0
        await waiting(node, (await node.submit(second)).id)
        kept = await node.submit(first, b"2")
        await waiting(node, kept.id)  # the second one has the better claim by now
        worker.die()
        await node.reap("first")
        assert (await running.future)[0].kind is OutcomeKind.LOST
        other = await node.worker(first, "w-3")
        run, body = await other.run()
        assert (body, run.number) == (b"2", 1)

    on_node(url, tmp_path, test)


def test_a_draining_worker_runs_waiting_calls_first(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        _, first, run, other, second = await contended(node)
        call = await node.submit(other, b"1")
        await waiting(node, call.id)
        await node.assign(other, "w-2", Desired.DRAIN, share=ON_GPU)
        first.answer(run)
        begun, _ = await second.run()
        second.answer(begun, b"2")
        assert isinstance((await second.next())[0], frames.Drain)

    on_node(url, tmp_path, test)


def test_a_call_that_calls_a_function_on_the_same_gpu_passes_its_turn_on(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        child, parent = await node.deploy("child"), await node.deploy("parent")
        first, second = await node.worker(parent, "w-1", ON_GPU), await node.worker(child, "w-2", ON_GPU)
        await both_ready(node)
        call = node.invoke(parent)
        outer, _ = await first.run()
        first.send(call_of(outer), b"{}")
        inner, _ = await second.run()
        second.answer(inner, b"1")
        answer, body = await first.next()
        assert (type(answer), body) == (frames.Answer, b"1")
        first.answer(outer, b"2")
        assert (await call.future)[1] == b"2"

    on_node(url, tmp_path, test)


def test_many_calls_of_two_functions_all_end(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        workers = []
        calls = []
        for number, name in enumerate(("f", "g")):
            revision = await node.deploy(name)
            workers.append(asyncio.create_task((await node.worker(revision, f"w-{number}", ON_GPU)).echo(100)))
            calls += [node.invoke(revision).future for _ in range(100)]
        replies = await asyncio.gather(*calls)
        assert {reply.kind for reply, _ in replies} == {OutcomeKind.SUCCEEDED}
        await asyncio.gather(*workers)

    on_node(url, tmp_path, test)


def test_a_worker_ends_when_only_an_overdue_call_and_calls_without_a_turn_are_left(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        first = await node.deploy("first", concurrency=2, timeout_s=5.0)
        second = await node.deploy("second")
        worker = await node.worker(first, "w-1", ON_GPU)
        await node.worker(second, "w-2", ON_GPU)
        await both_ready(node)
        overdue = node.invoke(first, b"1")
        await worker.run()
        node.turns_clock.skipped_s = 1.0
        await waiting(node, (await node.submit(second)).id)
        kept = await node.submit(first, b"2")
        await waiting(node, kept.id)  # second has the better claim by now
        node.skip(5.0)
        assert (await overdue.future)[0].kind is OutcomeKind.TIMED_OUT
        assert await node.reap("first") == "w-1"
        other = await node.worker(first, "w-3")
        run, body = await other.run()
        assert (body, run.number) == (b"2", 1)

    on_node(url, tmp_path, test)
