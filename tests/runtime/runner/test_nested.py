"""What a call inherits from the call that makes it: its deadline, its end; and that it fails where no worker starts."""

from __future__ import annotations

from pathlib import Path

from gpufn.bus import streams
from gpufn.errors import ErrorInfo
from gpufn.invocation import OutcomeKind
from gpufn.protocol import frames, subjects
from gpufn.protocol.messages import (
    ControllerReport,
    FunctionStatus,
    InvocationMessage,
    WorkerCounts,
    encode,
    unpack_invocation,
)
from tests.runtime.runner.node import Node, on_node


def call_of(parent: frames.Run, number: int = 1, timeout_s: float | None = None) -> frames.Call:
    return frames.Call(number, "call", "child", "", "application/json", "", timeout_s, parent.attempt)


async def queued(node: Node) -> InvocationMessage:
    """The child's invocation, from its queue."""
    while True:
        message = await streams.next_message(node.bus, subjects.SYNC, subjects.sync_queue("child", 1), 1)
        if message is not None:
            return unpack_invocation(message.payload)[0]


def test_a_call_has_no_more_time_than_its_parent(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        until = node.clock.time() + 5.0
        node.invoke(revision, timeout_s=5.0)
        run, _ = await worker.run()
        worker.send(call_of(run), b"{}")
        assert (await queued(node)).deadline <= until + 0.1

    on_node(url, tmp_path, test)


def test_a_call_keeps_its_own_shorter_time(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent")
        worker = await node.worker(revision)
        node.invoke(revision, timeout_s=20.0)
        run, _ = await worker.run()
        worker.send(call_of(run, timeout_s=3.0), b"{}")
        message = await queued(node)
        assert round(message.deadline - message.submitted_at, 1) == 3.0

    on_node(url, tmp_path, test)


def test_who_cancels_a_call_cancels_the_calls_that_it_makes(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        child = await node.deploy("child")
        revision = await node.deploy("parent")
        worker, childs = await node.worker(revision), await node.worker(child, "w-2")
        call = node.invoke(revision)
        run, _ = await worker.run()
        worker.send(call_of(run), b"{}")
        running, _ = await childs.run()
        call.cancel()
        assert (await worker.next())[0] == frames.Cancel(run.attempt)
        answer, _ = await worker.next()
        assert isinstance(answer, frames.Answer)
        assert (answer.call, answer.kind) == (1, OutcomeKind.CANCELLED)
        assert (await childs.next())[0] == frames.Cancel(running.attempt)
        worker.send(call_of(run, 2), b"{}")
        late, _ = await worker.next()
        assert isinstance(late, frames.Answer)
        assert (late.call, late.kind) == (2, OutcomeKind.CANCELLED)

    on_node(url, tmp_path, test)


def test_a_call_of_a_function_that_cannot_start_fails_with_its_error(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("child")
        revision = await node.deploy("parent", concurrency=2)
        worker = await node.worker(revision)
        node.invoke(revision)
        run, _ = await worker.run()
        worker.send(call_of(run), b"{}")
        await queued(node)
        status = FunctionStatus(
            function="child",
            serving=1,
            workers=WorkerCounts(),
            start_error=ErrorInfo("function_start_failed", "No module named 'torch'"),
        )
        node.bus.publish(subjects.CONTROLLER_REPORT, encode(ControllerReport("c", 1, 0.0, (status,))))
        for number in (1, 2):  # the one that waits, and the next at once
            answer, _ = await worker.next()
            assert isinstance(answer, frames.Answer)
            assert (answer.call, answer.kind, answer.error and answer.error.code) == (
                number,
                OutcomeKind.REJECTED,
                "function_start_failed",
            )
            assert answer.error is not None
            assert "child cannot start: No module named 'torch'" in answer.error.message
            worker.send(call_of(run, number + 1), b"{}")

    on_node(url, tmp_path, test)
