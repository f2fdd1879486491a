"""The gateway's end of the fast path, and the Caller that offers calls on it. The test plays the runner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import InvocationCancelled
from gpufn_core.ids import digest_of
from gpufn_core.protocol import fast_path, frames, subjects
from gpufn_core.protocol.messages import InvocationMessage, ResultReply, unpack_invocation
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_gateway.calls.fast_path import FastPath
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.streams import depths, ensure_streams, next_message
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.caller import Caller
from tests.waiting import until_async

SPEC = FunctionSpec(name="f", entry=EntryPoint("m", "f"), methods=(MethodSpec(),))
REVISION = Revision(function="f", number=1, spec=SPEC, bundle=digest_of(b""), created_at=7.0)


class Runner:
    """A fake runner that announces capacity and records the frames it receives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrived: asyncio.Queue[tuple[fast_path.GatewayFrame, bytes]] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._connected.set()
        read: frames.FrameReader[fast_path.GatewayFrame] = frames.FrameReader(fast_path.GatewayFrame)
        while data := await reader.read(1 << 16):
            for frame in read.feed(data):
                self._arrived.put_nowait(frame)
        writer.close()

    def send(self, frame: fast_path.RunnerFrame, body: bytes = b"") -> None:
        assert self._writer is not None
        self._writer.write(frames.encode(frame, body))

    async def offered(self) -> InvocationMessage:
        frame, _ = await self._arrived.get()
        assert isinstance(frame, fast_path.Offer), frame
        return frame.message

    async def next(self) -> fast_path.GatewayFrame:
        return (await self._arrived.get())[0]

    def end(self, message: InvocationMessage, body: bytes) -> None:
        reply = ResultReply(message.id, OutcomeKind.SUCCEEDED, None, "application/json", 1, 1, 0.0, 0.0)
        self.send(fast_path.Ended(reply), body)

    async def room(self, calls: int, *, created_at: float = 7.0) -> None:
        await self._connected.wait()
        self.send(fast_path.Limit("f", 1, created_at, calls))

    def disconnect(self) -> None:
        assert self._writer is not None
        self._writer.transport.abort()

    def stop(self) -> None:
        self._server.close()
        if self._writer is not None:
            self._writer.close()


class Scene:
    def __init__(self, bus: Bus, caller: Caller, way: FastPath, runner: Runner) -> None:
        self.bus = bus
        self.caller = caller
        self.lane = way
        self.runner = runner

    def invoke(self, body: bytes = b"{}") -> Any:
        deadline = SystemClock().time() + 30
        return self.caller.invoke(CallRequest(REVISION, "", "application/json", body, "application/json", deadline))

    async def call_on_the_lane(self) -> tuple[Any, InvocationMessage]:
        """Invoke a call over the fast path. Capacity must be known before, or the call stays in the queue."""
        call = self.invoke()
        assert call.offered is not None
        return call, await self.runner.offered()

    async def is_queued(self) -> None:
        while (await depths(self.bus)).get(("f", 1)) is None:
            pass

    async def queued(self) -> InvocationMessage:
        stored = await next_message(self.bus, subjects.SYNC, subjects.sync_queue("f", 1), 1)
        assert stored is not None
        return unpack_invocation(stored.payload)[0]


@asynccontextmanager
async def scene(nats: EmbeddedServer, path: Path, *, room: int = 1, created_at: float = 7.0) -> AsyncIterator[Scene]:
    bus = await Bus.connect(nats.url, name="test")
    await ensure_streams(bus)
    runner = Runner(path / "lane")
    await runner.start()
    caller = Caller(bus, name="gw", clock=SystemClock())
    way = FastPath(runner.path, caller)
    caller.start(way)
    way.tick(0.0)
    await runner.room(room, created_at=created_at)
    await until_async(lambda: way._capacity)
    try:
        yield Scene(bus, caller, way, runner)
    finally:
        way.close()
        runner.stop()
        await bus.js("STREAM.PURGE.GPUFN_SYNC", {})
        await bus.close()


async def test_a_call_and_its_result_use_the_fast_path(nats: EmbeddedServer, tmp_path: Path) -> None:
    async with scene(nats, tmp_path) as it:
        call, message = await it.call_on_the_lane()
        it.runner.end(message, b'"done"')
        reply, body = await call.future
        assert (reply.invocation, body) == (call.id, b'"done"')
        assert it.caller.pending == 0


async def test_a_call_beyond_the_room_is_queued(nats: EmbeddedServer, tmp_path: Path) -> None:
    async with scene(nats, tmp_path) as it:
        first, message = await it.call_on_the_lane()
        second = it.invoke()
        assert second.offered is None
        await it.is_queued()
        it.runner.end(message, b"1")
        await first.future
        third, _ = await it.call_on_the_lane()
        assert third.offered is not None, "there is room again"


async def test_a_refused_call_is_queued(nats: EmbeddedServer, tmp_path: Path) -> None:
    async with scene(nats, tmp_path, room=8) as it:
        call, message = await it.call_on_the_lane()
        it.runner.send(fast_path.Refused(message.id))
        await it.is_queued()
        assert call.offered is None
        assert not call.future.done()
        assert (await it.queued()).expires_at(2.0) == message.submitted_at + 2.0, "it waits on"


async def test_calls_in_flight_are_queued_when_the_runner_disconnects(nats: EmbeddedServer, tmp_path: Path) -> None:
    async with scene(nats, tmp_path) as it:
        call, message = await it.call_on_the_lane()
        call.start_deadline = call.since + 2.0
        it.runner.disconnect()
        await it.is_queued()
        assert not call.future.done()
        assert (await it.queued()).expires_at(2.0) == message.deadline, "the gateway has to assume that it has begun"
        assert call.start_deadline == math.inf
        assert it.invoke().offered is None


async def test_a_silent_runner_is_disconnected(nats: EmbeddedServer, tmp_path: Path) -> None:
    async with scene(nats, tmp_path) as it:
        call, _ = await it.call_on_the_lane()
        it.lane.tick(asyncio.get_running_loop().time() + fast_path.RUNNER_TIMEOUT_S + 1)
        await it.is_queued()
        assert call.offered is None


async def test_a_call_that_is_cancelled_is_withdrawn(nats: EmbeddedServer, tmp_path: Path) -> None:
    async with scene(nats, tmp_path) as it:
        call, message = await it.call_on_the_lane()
        call.cancel()
        assert await it.runner.next() == fast_path.Withdraw(message.id)
        assert isinstance(call.future.exception(), InvocationCancelled)
        it.runner.end(message, b"too late")
        _, second = await it.call_on_the_lane()
        assert second.id != message.id


async def test_a_call_whose_retry_is_queued_waits_for_the_reply_of_the_bus(
    nats: EmbeddedServer, tmp_path: Path
) -> None:
    async with scene(nats, tmp_path) as it:
        call, message = await it.call_on_the_lane()
        it.runner.send(fast_path.Queued(message.id))
        await until_async(lambda: call.offered is None)
        other, _ = await it.call_on_the_lane()
        assert other.offered is not None, "its room is free"
        assert call.offered is None
        assert not call.future.done()


async def test_nothing_is_kept_of_a_revision_that_has_no_room_any_more(nats: EmbeddedServer, tmp_path: Path) -> None:
    async with scene(nats, tmp_path) as it:
        call, message = await it.call_on_the_lane()
        await it.runner.room(0)
        it.runner.send(fast_path.Refused(message.id))
        await until_async(lambda: call.offered is None)
        assert (it.lane._capacity, it.lane._in_flight, it.lane._counts, it.lane._refused_until) == ({}, {}, {}, {})


async def test_a_revision_of_another_platform_is_not_ours(nats: EmbeddedServer, tmp_path: Path) -> None:
    async with scene(nats, tmp_path, created_at=8.0) as it:
        assert it.invoke().offered is None
        it.runner.send(fast_path.Limit("f", 1, REVISION.created_at, 1))
        await until_async(lambda: len(it.lane._capacity) == 2)
        call, _ = await it.call_on_the_lane()
        assert call.offered is not None, "its creation time distinguishes it"


@pytest.mark.parametrize(
    "sent", [b"\0\0\0\x04\0\0\0\0\x92\x0e\xa1\xff", b"\xff" * 8, frames.encode(fast_path.Withdraw("i"))]
)
async def test_bytes_that_no_runner_sends_end_the_connection(tmp_path: Path, sent: bytes) -> None:
    """Bug: a text that was not UTF-8 raised an exception in the event loop."""
    ended: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        ended.append(await reader.read())
        writer.close()

    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    async with await asyncio.start_unix_server(serve, str(tmp_path / "s")):
        path = FastPath(tmp_path / "s", Mock())
        path.tick(0.0)
        await until_async(lambda: bool(ended))
        assert not path.is_connected
    assert errors == []
