"""A call whose GPU fails runs again elsewhere, but not endlessly."""

from __future__ import annotations

from pathlib import Path

from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.worker import Exit
from gpufn_core.errors import DeviceFailed
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import WorkerEvent, WorkerEventKind
from gpufn_core.spec.function_spec import CallKind
from gpufn_platform.queue.records import call_records
from tests.runtime.runner.node import NODE, FakeWorker, Node, on_node


def _fail(worker: FakeWorker, run: frames.Run) -> None:
    """Do what a worker does: ask to be replaced, and report the call as lost."""
    worker.send(frames.Draining())
    error = DeviceFailed("the GPU failed: MPS client has been terminated").info()
    worker.send(frames.Result(run.attempt, OutcomeKind.LOST, error, "", 0.001))


def test_a_call_whose_gpu_failed_runs_on_another_worker_without_a_policy(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("failed")
        first = await node.worker(revision, "w-1")
        call = node.invoke(revision, b'"again"')
        run, _ = await first.run()
        _fail(first, run)
        assert isinstance((await first.next())[0], frames.Drain)
        second = await node.worker(revision, "w-2")
        run, body = await second.run()
        assert (run.number, body) == (2, b'"again"')
        second.answer(run, body)
        reply, _ = await call.future
        assert (reply.kind, reply.worker) == (OutcomeKind.SUCCEEDED, "w-2")

    on_node(url, tmp_path, test)


def test_a_worker_that_was_ended_for_its_gpu_hands_its_calls_back(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("ended")
        first = await node.worker(revision, "w-1")
        call = node.invoke(revision)
        await first.run()
        first.die()
        order = await node.kills.get()
        end = Exit(signal=9, device_fault="GPU-1: its MPS server is in FAULT")
        exited = WorkerEvent(WorkerEventKind.EXITED, order.worker, "ended", 1, NODE, node.clock.time(), exit=end)
        node.bus.publish(subjects.worker_event("ended"), encode(exited))
        second = await node.worker(revision, "w-2")
        run, body = await second.run()
        second.answer(run, body)
        assert (await call.future)[0].kind is OutcomeKind.SUCCEEDED

    on_node(url, tmp_path, test)


def test_a_call_that_gpus_fail_under_is_lost_at_the_third(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("killer")
        call = node.invoke(revision)
        for number in range(3):
            worker = await node.worker(revision, f"w-{number}")
            run, _ = await worker.run()
            _fail(worker, run)
        reply, _ = await call.future
        assert reply.kind is OutcomeKind.LOST
        assert reply.error is not None
        assert (reply.error.code, reply.error.retryable) == ("device_failed", True)

    on_node(url, tmp_path, test)


def test_a_stream_that_has_begun_does_not_begin_again(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("streams", kind=CallKind.GENERATOR)
        worker = await node.worker(revision)
        stream = node.caller.open_stream(node.request(revision))
        run, _ = await worker.run()
        worker.send(frames.Item(run.attempt, "application/json"), b"1")
        _fail(worker, run)
        reply, _ = await stream.future
        assert (reply.kind, reply.items) == (OutcomeKind.LOST, 1)
        assert reply.error is not None
        assert reply.error.code == "device_failed"

    on_node(url, tmp_path, test)


def test_a_submitted_call_whose_gpu_failed_ends_with_its_result(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("kept")
        call = await node.submit(revision, b"1")
        for name in ("w-1", "w-2"):
            worker = await node.worker(revision, name)
            run, body = await worker.run()
            assert body == b"1"
            if name == "w-1":
                _fail(worker, run)
            else:
                worker.answer(run, b"2")
        record, result = await call_records.wait(node.bus, call.id, 10)
        assert (record.state, result, record.attempt) == (InvocationState.SUCCEEDED, b"2", 2)

    on_node(url, tmp_path, test)
