"""Fast path: calls that a gateway of this host sends to the runner, past the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.protocol import fast_path, frames, subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import InvocationMessage, ResultReply, unpack_reply
from gpufn_core.spec.function_spec import Retry
from gpufn_platform.bus.connection import Message
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.records import call_records
from gpufn_runtime.runner.dispatch.fast_path import FastPathServer
from tests.runtime.runner.node import FakeWorker, Node, on_node

_COUNT = iter(range(10**6))


class Gateway:
    """Fake gateway: the other end of the fast path."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames: frames.FrameReader[fast_path.RunnerFrame] = frames.FrameReader(fast_path.RunnerFrame)
        self._seen: list[tuple[fast_path.RunnerFrame, bytes]] = []

    async def next(self) -> tuple[fast_path.RunnerFrame, bytes]:
        """Return the runner's next frame, except heartbeats."""
        while True:
            while not self._seen:
                data = await self._reader.read(1 << 16)
                if not data:
                    raise EOFError
                self._seen.extend(self._frames.feed(data))
            frame, body = self._seen.pop(0)
            if not isinstance(frame, fast_path.Heartbeat):
                return frame, body

    async def room(self) -> fast_path.Limit:
        while True:
            frame, _ = await self.next()
            if isinstance(frame, fast_path.Limit):
                return frame

    async def answer(self) -> tuple[fast_path.Ended | fast_path.Refused | fast_path.Queued, bytes]:
        while True:
            frame, body = await self.next()
            if not isinstance(frame, (fast_path.Limit, fast_path.Heartbeat)):
                return frame, body

    def offer(self, revision: Revision, body: bytes = b"{}") -> str:
        message = message_of(revision, f"{next(_COUNT):026d}")
        self._writer.write(frames.encode(fast_path.Offer(message), body))
        return message.id

    def withdraw(self, invocation: str) -> None:
        self._writer.write(frames.encode(fast_path.Withdraw(invocation)))

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)

    def hang_up(self) -> None:
        self._writer.transport.abort()


def message_of(revision: Revision, invocation: str) -> InvocationMessage:
    return InvocationMessage(
        id=invocation, function=revision.function, revision=revision.number, method="",
        content_type="application/json", accept="application/json",
        reply=subjects.reply(revision.function, "gateway", invocation), submitted_at=0.0,
    )  # fmt: skip


@asynccontextmanager
async def gateway_of(node: Node) -> AsyncIterator[Gateway]:
    gateway = Gateway(*await asyncio.open_unix_connection(str(node.home.fast_path_socket)))
    try:
        yield gateway
    finally:
        gateway.hang_up()


async def short_calls(node: Node, revision: Revision, worker: FakeWorker, calls: int = 30) -> None:
    """Let the runner learn that calls of this revision are short."""
    for _ in range(calls):
        call = node.invoke(revision)
        worker.answer((await worker.run())[0])
        await call.future


async def in_the_queue(node: Node, function: str) -> None:
    while (function, 1) not in await streams.depths(node.bus):
        pass


def test_a_call_on_the_fast_path_runs_at_once_and_is_answered_there(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("direct")
        worker = await node.worker(revision)
        async with gateway_of(node) as gateway:
            await short_calls(node, revision, worker)
            room = await gateway.room()
            assert (room.function, room.revision, room.created_at) == ("direct", 1, revision.created_at)
            assert room.calls >= 1
            invocation = gateway.offer(revision, b'"hello"')
            await worker.echo(1)
            ended, body = await gateway.answer()
            assert isinstance(ended, fast_path.Ended)
            assert (ended.reply.invocation, ended.reply.kind, body) == (invocation, OutcomeKind.SUCCEEDED, b'"hello"')
            assert ("direct", 1) not in await streams.depths(node.bus)

    on_node(url, tmp_path, test)


def test_a_later_gateway_receives_the_available_room(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("later")
        worker = await node.worker(revision)
        async with gateway_of(node) as first:
            await short_calls(node, revision, worker)
            await first.room()
            async with gateway_of(node) as second:
                assert (await second.room()).function == "later"

    on_node(url, tmp_path, test)


def test_the_fast_path_has_no_room_for_calls_of_unknown_length(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("unknown")
        await node.worker(revision)
        async with gateway_of(node) as gateway:
            other = await node.deploy("short")
            await short_calls(node, other, await node.worker(other, "w-2"))
            assert (await gateway.room()).function == "short"

    on_node(url, tmp_path, test)


def test_a_revision_that_is_not_here_is_refused(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("elsewhere")
        async with gateway_of(node) as gateway:
            invocation = gateway.offer(revision)
            assert (await gateway.answer())[0] == fast_path.Refused(invocation)

    on_node(url, tmp_path, test)


def test_calls_stand_in_line_and_are_handed_back_when_one_lasts(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("lasts")
        worker = await node.worker(revision)
        async with gateway_of(node) as gateway:
            await short_calls(node, revision, worker)
            first, second = gateway.offer(revision, b"1"), gateway.offer(revision, b"2")
            run, _ = await worker.run()  # and nothing more, for longer than any call waits in the backlog
            assert (await gateway.answer())[0] == fast_path.Refused(second)
            worker.answer(run)
            ended, _ = await gateway.answer()
            assert isinstance(ended, fast_path.Ended)
            assert ended.reply.invocation == first

    on_node(url, tmp_path, test)


def test_a_delivery_whose_slot_was_taken_past_the_queue_is_next(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("next")
        worker = await node.worker(revision)
        async with gateway_of(node) as gateway:
            await short_calls(node, revision, worker)
            gateway.offer(revision, b"1")
            run, _ = await worker.run()
            queued = node.invoke(revision, b"2")
            await in_the_queue(node, "next")
            worker.answer(run)
            await worker.echo(1)
            assert (await queued.future)[1] == b"2"

    on_node(url, tmp_path, test)


def test_a_withdrawn_call_is_cancelled_whether_it_runs_or_stands_in_line(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("withdrawn")
        worker = await node.worker(revision)
        async with gateway_of(node) as gateway:
            await short_calls(node, revision, worker)
            runs, turn_waits = gateway.offer(revision, b"1"), gateway.offer(revision, b"2")
            run, _ = await worker.run()
            gateway.withdraw(turn_waits)
            gateway.withdraw(runs)
            frame, _ = await worker.next()
            assert frame == frames.Cancel(run.attempt)
            worker.send(frames.Result(run.attempt, OutcomeKind.CANCELLED, None, "", 0.0))
            after = gateway.offer(revision, b"3")
            assert (await worker.run())[1] == b"3", "a call that is withdrawn from the backlog never runs"
            assert after

    on_node(url, tmp_path, test)


def test_a_gateway_that_disconnects_cancels_its_calls(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("gone")
        worker = await node.worker(revision)
        async with gateway_of(node) as gateway:
            await short_calls(node, revision, worker)
            gateway.offer(revision)
            run, _ = await worker.run()
        frame, _ = await worker.next()
        assert frame == frames.Cancel(run.attempt)

    on_node(url, tmp_path, test)


def test_a_call_that_was_queued_while_its_first_attempt_is_cancelled_is_still_known(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("twice", concurrency=2)
        worker = await node.worker(revision)
        async with gateway_of(node) as gateway:
            await short_calls(node, revision, worker)
            invocation = gateway.offer(revision)
            first, _ = await worker.run()
        assert (await worker.next())[0] == frames.Cancel(first.attempt)
        node.bus.publish(subjects.sync_queue("twice", 1), pack(message_of(revision, invocation), b"{}"))
        second, _ = await worker.run()
        worker.send(frames.Result(first.attempt, OutcomeKind.CANCELLED, None, "", 0.0))
        third = node.invoke(revision)  # it gets the slot of the first call
        worker.answer((await worker.run())[0])
        await third.future
        held = await call_records.locate(node.bus, invocation)
        assert held is not None
        assert held.worker == "w-1"
        worker.answer(second)

    on_node(url, tmp_path, test)


def test_the_next_attempt_of_a_call_on_the_fast_path_is_queued(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("again", retries=Retry(1, delay_s=0))
        worker = await node.worker(revision)
        async with gateway_of(node) as gateway:
            await short_calls(node, revision, worker)
            invocation = gateway.offer(revision, b"1")
            run, _ = await worker.run()
            worker.send(frames.Result(run.attempt, OutcomeKind.RAISED, None, "", 0.0))
            assert (await gateway.answer())[0] == fast_path.Queued(invocation)
            again, body = await worker.run()
            assert (again.number, body) == (2, b"1")

    on_node(url, tmp_path, test)


def test_garbage_on_the_fast_path_ends_only_that_connection(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("fine")
        worker = await node.worker(revision)
        async with gateway_of(node) as bad, gateway_of(node) as good:
            bad.send_raw(b"\xff" * 64)
            with_nothing_left = asyncio.ensure_future(bad.next())
            await asyncio.wait([with_nothing_left])
            assert isinstance(with_nothing_left.exception(), (EOFError, ConnectionResetError))
            await short_calls(node, revision, worker)
            assert (await good.room()).calls

    on_node(url, tmp_path, test)


def test_the_report_counts_calls_outside_the_queues(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        revision = await node.deploy("counted")
        worker = await node.worker(revision)
        async with gateway_of(node) as gateway:
            await short_calls(node, revision, worker)
            gateway.offer(revision)
            await worker.run()
            while True:
                report = await node.reports.get()
                counted = [traffic.direct for traffic in report.traffic if traffic.function == "counted"]
                if counted == [1]:
                    break

    on_node(url, tmp_path, test)


def test_a_gateway_that_disconnects_late_cancels_none_of_its_queued_calls(url: str, tmp_path: Path) -> None:
    """The gateway lost contact with a runner that was stopped for seconds. The runner may read its queues first."""

    async def test(node: Node) -> None:
        revision = await node.deploy("stopped", concurrency=2)
        worker = await node.worker(revision)
        async with gateway_of(node) as gateway:
            await short_calls(node, revision, worker)
            invocation = gateway.offer(revision)
            first, _ = await worker.run()
            queued = message_of(revision, invocation)
            answers: asyncio.Queue[Message] = asyncio.Queue()
            node.bus.subscribe(queued.reply, answers.put_nowait)
            node.bus.publish(subjects.sync_queue("stopped", 1), pack(queued, b"{}"))
            second, _ = await worker.run()
        assert (await worker.next())[0] == frames.Cancel(first.attempt)
        worker.answer(second, b"2")
        reply, body = unpack_reply((await answers.get()).payload)
        assert isinstance(reply, ResultReply)
        assert (reply.kind, body) == (OutcomeKind.SUCCEEDED, b"2")

    on_node(url, tmp_path, test)


@pytest.mark.parametrize(
    "sent", [b"\0\0\0\x04\0\0\0\0\x92\x02\xa1\xff", b"\xff" * 8, frames.encode(fast_path.Heartbeat())]
)
def test_bytes_that_no_gateway_sends_end_its_connection(tmp_path: Path, sent: bytes) -> None:
    """Bug: a text that was not UTF-8 raised an exception in the event loop."""

    async def scenario() -> list[dict[str, Any]]:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        server = FastPathServer(tmp_path / "s", Mock(), Mock())
        await server.open()
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(sent)
            assert await reader.read() == b""
        writer.close()
        server.close()
        return errors

    assert asyncio.run(scenario()) == []
