"""Node for runner tests: a real bus, a Runner in this event loop, and fake workers controlled by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Function, Revision
from gpufn_core.domain.usage import USAGE_RETENTION_S
from gpufn_core.domain.worker import Assignment, Desired, Exit, WorkerState
from gpufn_core.home import Home
from gpufn_core.ids import digest_of, new_invocation_id
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import PROTOCOL, encode
from gpufn_core.protocol.messages import KillOrder
from gpufn_core.protocol.records import BodyReference, CallRecord
from gpufn_core.protocol.reports import RunnerReport, WorkerEvent, WorkerEventKind, WorkerReport
from gpufn_core.spec.function_spec import CallKind, EntryPoint, FunctionSpec, MethodSpec, Retry
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue import large_bodies
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.caller import Caller
from gpufn_platform.queue.records import call_records
from gpufn_platform.volume_store.on_bus import BusStore
from gpufn_runtime.runner.gpu.gpu_turns import NodeTurns
from gpufn_runtime.runner.loop import Runner

T = TypeVar("T")
NODE = "n1"
SHARE = DeviceShare(cpu_device="cpu", cores=0.1, memory_bytes=1 << 20)


class SettableClock(SystemClock):
    """Fake clock. `ahead_s`: offset of the wall clock. `skipped_s`: time that has been skipped."""

    def __init__(self) -> None:
        self.ahead_s = self.skipped_s = 0.0

    def time(self) -> float:
        return SystemClock.time() + self.ahead_s

    def monotonic(self) -> float:
        return SystemClock.monotonic() + self.skipped_s


class FakeWorker:
    """Fake worker: the worker's end of the socket."""

    def __init__(self, worker: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.worker = worker
        self._reader = reader
        self._writer = writer
        self._frames: frames.FrameReader[frames.RunnerFrame] = frames.FrameReader(frames.RunnerFrame)
        self._seen: list[tuple[frames.RunnerFrame, bytes]] = []

    @classmethod
    async def connect(cls, worker: str, path: Path, hello: frames.Hello | None = None) -> FakeWorker:
        while True:
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                reader, writer = await asyncio.open_unix_connection(str(path))
                break
            await asyncio.sleep(0.001)
        self = cls(worker, reader, writer)
        self.send(hello or frames.Hello(PROTOCOL, worker))
        return self

    def send(self, frame: frames.WorkerFrame, body: bytes = b"") -> None:
        self._writer.write(frames.encode(frame, body))

    def send_raw(self, data: bytes) -> None:
        self._writer.write(data)

    def ready(self, modules: tuple[str, ...] = ()) -> None:
        self.send(frames.Ready(0.01, 0.0, modules))

    async def next(self) -> tuple[frames.RunnerFrame, bytes]:
        while not self._seen:
            data = await self._reader.read(1 << 16)
            if not data:
                raise EOFError
            self._seen.extend(self._frames.feed(data))
        return self._seen.pop(0)

    async def run(self) -> tuple[frames.Run, bytes]:
        frame, body = await self.next()
        assert isinstance(frame, frames.Run), frame
        return frame, body

    def answer(self, run: frames.Run, body: bytes = b"null") -> None:
        self.send(frames.Result(run.attempt, OutcomeKind.SUCCEEDED, None, "application/json", 0.001), body)

    async def echo(self, calls: int) -> None:
        for _ in range(calls):
            run, body = await self.run()
            self.answer(run, body)

    def die(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Node:
    def __init__(self, bus: Bus, home: Home) -> None:
        self.bus = bus
        self.home = home
        self.clock = SettableClock()
        self.turns_clock = SettableClock()
        self.kills: asyncio.Queue[KillOrder] = asyncio.Queue()
        self.reports: asyncio.Queue[RunnerReport] = asyncio.Queue()
        self.workers: list[FakeWorker] = []

    async def open(self) -> None:
        await streams.ensure_streams(self.bus)
        await object_store.ensure_bucket(self.bus, subjects.RESULT_FILES, expires=True)
        self.assignments = await KeyValue.open(self.bus, subjects.ASSIGNMENTS)
        self.functions = await KeyValue.open(self.bus, subjects.FUNCTIONS)
        self.revisions = await KeyValue.open(self.bus, subjects.REVISIONS)
        self.teams = await KeyValue.open(self.bus, subjects.TEAMS)
        self.usage = await KeyValue.open(self.bus, subjects.USAGE, ttl_s=USAGE_RETENTION_S)
        self.bus.subscribe(subjects.kill(NODE), self._on_kill)
        self.bus.subscribe(subjects.runner_report(NODE), self._on_report)
        self.caller = Caller(self.bus, name="gateway", clock=self.clock)
        self.caller.start()

    async def start(self, bus: Bus | None = None) -> None:
        """`bus` is used by the runner alone, and closed when it dies."""
        self.serving = self.runner(bus=bus)
        self._running = asyncio.create_task(self.serving.run())
        await self.reports.get()

    async def stop(self) -> None:
        """Stop the runner, like SIGTERM."""
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    def _on_kill(self, message: Message) -> None:
        self.kills.put_nowait(msgspec.msgpack.decode(message.payload, type=KillOrder))

    def _on_report(self, message: Message) -> None:
        self.reports.put_nowait(msgspec.msgpack.decode(message.payload, type=RunnerReport))

    def runner(self, name: str = "r1", bus: Bus | None = None) -> Runner:
        return Runner(
            bus or self.bus,
            name=name,
            node=NODE,
            home=self.home,
            clock=self.clock,
            turns=NodeTurns(self.turns_clock, 1, asyncio.get_running_loop().call_later),
            volume_files=BusStore(bus or self.bus, purges=False),
        )

    async def deploy(self, name: str = "f", *, kind: CallKind = CallKind.SYNC, **options: Any) -> Revision:
        spec = FunctionSpec(
            name=name, entry=EntryPoint(module="m", qualname="f"), methods=(MethodSpec(kind=kind),), **options
        )
        revision = Revision(function=name, number=1, spec=spec, bundle=digest_of(b""), created_at=0.0)
        function = Function(name=name, active=1, serving=1, latest=1, updated_at=0.0)
        await self.revisions.put(subjects.revision_key(name, 1), encode(revision))
        await self.functions.put(name, encode(function))
        return revision

    async def assign(
        self,
        revision: Revision,
        worker: str,
        desired: Desired = Desired.RUN,
        *,
        park_bytes: int = 0,
        share: DeviceShare = SHARE,
    ) -> None:
        assignment = Assignment(
            worker=worker,
            node=NODE,
            function=revision.function,
            revision=revision.number,
            share=share,
            epoch=1,
            created_at=self.clock.time(),
            desired=desired,
            park_bytes=park_bytes,
        )
        await self.assignments.put(subjects.assignment_key(NODE, worker), encode(assignment))

    async def unassign(self, worker: str) -> None:
        await self.assignments.delete(subjects.assignment_key(NODE, worker))

    async def worker(self, revision: Revision, worker: str = "w-1", share: DeviceShare = SHARE) -> FakeWorker:
        """Assign and connect a worker, and wait until it is READY."""
        await self.assign(revision, worker, share=share)
        fake = await self.connect(worker)
        fake.ready()
        return fake

    async def connect(self, worker: str, hello: frames.Hello | None = None) -> FakeWorker:
        fake = await FakeWorker.connect(worker, self.home.worker_socket(worker), hello)
        self.workers.append(fake)
        return fake

    async def reap(self, function: str, exit: Exit = Exit(signal=9)) -> str:  # noqa: A002, B008  it is frozen
        """Do what the agent does on a kill order: report the exit. Returns the worker's name."""
        worker = (await self.kills.get()).worker
        event = WorkerEvent(WorkerEventKind.EXITED, worker, function, 1, NODE, self.clock.time(), exit=exit)
        self.bus.publish(subjects.worker_event(function), encode(event))
        return worker

    async def report_of(self, worker: str, state: WorkerState) -> WorkerReport:
        """Wait for the first report with the worker in `state`."""
        while True:
            for known in (await self.reports.get()).workers:
                if known.worker == worker and known.state is state:
                    return known

    def skip(self, passed_s: float) -> None:
        """Advance the clock, and wait until the runner has checked its attempts."""
        self.clock.skipped_s += passed_s
        for queue in self.serving._queues.values():
            for _ in range(2):  # the first run handles the timers that were due before
                queue._on_timer()

    async def report_without(self, worker: str) -> None:
        """Wait for the next report without the worker."""
        while any(known.worker == worker for known in (await self.reports.get()).workers):
            pass

    async def submit(
        self, revision: Revision, body: bytes = b"{}", invocation: str = "", *, is_live: bool = False
    ) -> CallRecord:
        """Publish a call like a gateway."""
        request = self.request(revision, body)._replace(deadline=0.0, is_live=is_live)
        return await call_records.submit(
            self.bus, request, now=self.clock.time(), invocation=invocation or new_invocation_id()
        )

    async def queue_is_empty(self, revision: Revision) -> None:
        while (revision.function, revision.number) in await streams.depths(self.bus):
            pass

    def invoke(self, revision: Revision, body: bytes = b"{}", timeout_s: float = 30.0) -> Any:
        return self.caller.invoke(self.request(revision, body, timeout_s))

    def request(self, revision: Revision, body: bytes = b"{}", timeout_s: float = 30.0) -> CallRequest:
        deadline = self.clock.time() + timeout_s
        return CallRequest(revision, "", "application/json", body, "application/json", deadline)


@contextlib.asynccontextmanager
async def running_node(url: str, directory: Path) -> AsyncIterator[Node]:
    bus, home = await Bus.connect(url, name="test"), Home(directory)
    try:
        node = Node(bus, home)
        await node.open()
        await node.start()
        try:
            yield node
        finally:
            await node.stop()
            for worker in node.workers:
                await worker.close()
    finally:
        await bus.close()
        home.remove_runtime_folders()


async def read(bus: Bus, bucket: str, reference: BodyReference) -> bytes:
    """Read a body that was too large for its message."""
    return b"".join([part async for part in large_bodies.read(bus, bucket, reference)])


def on_node(url: str, directory: Path, test: Callable[[Node], Awaitable[T]]) -> T:
    """Run `test` on a node of its own; a hang is a failure."""

    async def main() -> T:
        async with asyncio.timeout(30):
            async with running_node(url, directory) as node:
                return await test(node)

    return asyncio.run(main())


RETRY_AT_ONCE = Retry(1, delay_s=0.0)
