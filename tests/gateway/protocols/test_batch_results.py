"""The end of batches: what is read, what is written, and what remains after a lost race. The bucket is real."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import CapacityError, Conflict, GpufnError, InvalidInput, PayloadTooLarge
from gpufn_core.ids import new_ulid
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import Serves
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.protocols import client_files
from gpufn_gateway.protocols.captured import Outcome
from gpufn_gateway.protocols.client_files import ClientFiles
from gpufn_gateway.protocols.openai import batch_lines
from gpufn_gateway.protocols.openai.batch_lines import BatchCall
from gpufn_gateway.protocols.openai.batches import BatchRoutes
from gpufn_gateway.protocols.openai.files import FileRoutes
from gpufn_gateway.protocols.platform import CallOptions
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue import large_bodies
from tests.gateway.protocols.test_openai_batches import lines

CHAT = "/v1/chat/completions"


class StubPlatform:
    """Calls whose states the test sets. Each result is `"text"`."""

    def __init__(self, files: ClientFiles) -> None:
        self.files = files
        self.states: dict[str, InvocationState] = {}
        self.read: list[str] = []
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.refuses: dict[str, GpufnError] = {}
        self.while_read: Callable[[], Awaitable[None]] | None = None

    async def record(self, call: str, request: Request) -> CallRecord:
        return CallRecord(id=call, function="f", revision=1, state=self.states[call], submitted_at=0.0)

    async def outcome(self, call: str, request: Request) -> tuple[CallRecord, Outcome | None]:
        self.read.append(call)
        if self.while_read is not None:
            during, self.while_read = self.while_read, None
            await during()
        if call in self.refuses:
            raise self.refuses[call]
        record = await self.record(call, request)
        is_good = record.state is InvocationState.SUCCEEDED
        return record, Outcome("application/json", b'"text"', []) if is_good else None

    def resolve(self, model: str, request: Request) -> Any:
        spec = SimpleNamespace(serves=Serves.OPENAI_CHAT)
        signature = SimpleNamespace(check=lambda arguments: None)
        return SimpleNamespace(path=model, revision=SimpleNamespace(spec=spec), signature=signature)

    async def body(self, request: Request) -> bytes:
        return await request.body()

    async def submit(self, function: str, arguments: bytes, request: Request, options: CallOptions) -> CallRecord:
        call = new_ulid()
        self.submitted.append(call)
        self.states[call] = InvocationState.QUEUED
        return await self.record(call, request)

    async def cancel(self, call: str, request: Request) -> None:
        self.cancelled.append(call)


class Batches:
    """The routes of batches for one owner."""

    def __init__(self, files: ClientFiles) -> None:
        self.files = files
        self.owner = f"o{new_ulid()}"
        self.platform = StubPlatform(files)
        platform: Any = self.platform
        self.routes = BatchRoutes(platform, FileRoutes(platform, "/v1"), "/v1")

    async def started(self, *calls: str) -> str:
        """Store a batch of running calls; return its id."""
        self.platform.states |= dict.fromkeys(calls, InvocationState.RUNNING)
        rows = msgspec.json.encode([BatchCall(f"row {call}", "f", call=call) for call in calls])
        batch = await self.files.create_batch(
            self.owner, rows, endpoint=CHAT, input_file="i", metadata={}, total=len(calls)
        )
        return batch.id

    def request(self, batch: str = "", body: bytes = b"") -> Request:
        async def receive() -> Any:
            return {"type": "http.request", "body": body}

        principal = SimpleNamespace(owner=self.owner)
        return Request({"type": "http", "path_params": {"id": batch}, "gpufn.principal": principal}, receive)

    async def create(self, file: str, **fields: Any) -> Any:
        given = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"} | fields
        response = await self.routes.create(self.request(body=msgspec.json.encode(given)))
        return msgspec.json.decode(bytes(response.body))

    async def shown(self, batch: str) -> Any:
        response = await self.routes.show(self.request(batch))
        return msgspec.json.decode(bytes(response.body))

    def end(self, *calls: str) -> None:
        self.platform.states |= dict.fromkeys(calls, InvocationState.SUCCEEDED)


@contextlib.asynccontextmanager
async def batches_on(nats: Any) -> AsyncIterator[Batches]:
    bus = await Bus.connect(nats.url, name="gateway")
    try:
        await large_bodies.ensure_buckets(bus)
        yield Batches(ClientFiles(bus, (await Buckets.open(bus)).client_files, SystemClock()))
    finally:
        await bus.close()


async def test_results_are_read_once_when_all_calls_have_ended(nats: Any) -> None:
    async with batches_on(nats) as batches:
        batch = await batches.started("a", "b")
        batches.end("a")
        assert (await batches.shown(batch))["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
        assert batches.platform.read == []
        batches.end("b")
        assert (await batches.shown(batch))["status"] == "completed"
        await batches.shown(batch)
        assert batches.platform.read == ["a", "b"]


async def test_a_result_that_is_too_large_for_a_file_is_an_error_of_its_line(nats: Any) -> None:
    async with batches_on(nats) as batches:
        batch = await batches.started("a", "b")
        batches.end("a", "b")
        batches.platform.refuses["a"] = PayloadTooLarge("too large")
        ended = await batches.shown(batch)
        assert (ended["status"], ended["request_counts"]["completed"], ended["request_counts"]["failed"]) == (
            "completed", 1, 1,
        )  # fmt: skip


async def test_a_batch_that_is_cancelled_while_it_ends_is_cancelled(nats: Any) -> None:
    async with batches_on(nats) as batches:
        batch = await batches.started("a")
        batches.end("a")

        async def cancel() -> None:
            stored = await batches.files.find_batch(batches.owner, batch)
            await batches.files.change_batch(stored, is_cancelled=True)

        batches.platform.while_read = cancel
        assert (await batches.shown(batch))["status"] == "cancelled"


async def test_the_loser_of_a_race_removes_its_files(nats: Any) -> None:
    async with batches_on(nats) as batches:
        batch = await batches.started("a", "b")
        batches.end("a")
        batches.platform.states["b"] = InvocationState.FAILED

        async def end() -> None:
            stored = await batches.files.find_batch(batches.owner, batch)
            await batches.files.change_batch(stored, is_ended=True, output_file="first")

        batches.platform.while_read = end
        assert (await batches.shown(batch))["output_file_id"] == "file-first"
        assert await batches.files.all(batches.owner) == []


async def test_a_file_without_its_batch_is_removed(nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batches_on(nats) as batches:
        batch = await batches.started("a", "b")
        batches.end("a")
        batches.platform.states["b"] = InvocationState.FAILED
        create = batches.files.create

        async def create_only_output(owner: str, name: str, *given: Any, **more: Any) -> Any:
            if "error" in name:
                raise CapacityError("the store is full")
            return await create(owner, name, *given, **more)

        monkeypatch.setattr(batches.files, "create", create_only_output)
        with pytest.raises(CapacityError):
            await batches.shown(batch)
        assert await batches.files.all(batches.owner) == []


async def test_calls_without_a_batch_are_cancelled(nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batches_on(nats) as batches:
        file = await batches.files.create(batches.owner, "in", "application/jsonl", lines("f", "a", "b"))

        async def full(*_: Any, **__: Any) -> None:
            raise CapacityError("the store is full")

        monkeypatch.setattr(batches.files, "create_batch", full)
        with pytest.raises(CapacityError):
            await batches.create(file.id)
        assert sorted(batches.platform.cancelled) == sorted(batches.platform.submitted)
        assert len(batches.platform.submitted) == 2


async def test_a_key_keeps_a_limited_number_of_files_and_batches(nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batches_on(nats) as batches:
        file = await batches.files.create(batches.owner, "in", "text/plain", lines("f", "a"))
        await batches.started("a")
        monkeypatch.setattr(client_files, "MAX_OWNED_RECORDS", 2)
        with pytest.raises(Conflict):
            await batches.files.create(batches.owner, "empty", "text/plain", b"")
        with pytest.raises(Conflict):
            await batches.create(file.id)
        assert batches.platform.submitted == []


async def test_the_calls_of_batches_count_as_bytes(nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batches_on(nats) as batches:
        await batches.started("a")
        monkeypatch.setattr(client_files, "MAX_OWNED_BYTES", 10)
        with pytest.raises(Conflict):
            await batches.files.create(batches.owner, "in", "text/plain", b"1")
        with pytest.raises(Conflict):
            await batches.started("b")


async def test_the_stored_fields_of_a_batch_are_short(nats: Any) -> None:
    async with batches_on(nats) as batches:
        with pytest.raises(InvalidInput):
            await batches.files.create(batches.owner, "n" * 513, "text/plain", b"")
        named = {"custom_id": "n" * 513}
        for changes, model in ((named, "f"), ({"custom_id": ""}, "f"), ({}, "f" * 513)):
            file = await batches.files.create(batches.owner, "in", "text/plain", lines(model, "a", **changes))
            with pytest.raises(InvalidInput):
                await batches.create(file.id)
        file = await batches.files.create(batches.owner, "in", "text/plain", lines("f", "a", custom_id="n" * 512))
        for metadata in ({"k" * 65: "v"}, {"k": "v" * 513}, {str(key): "v" for key in range(17)}):
            with pytest.raises(InvalidInput):
                await batches.create(file.id, metadata=metadata)
        assert (await batches.create(file.id, metadata={"k" * 64: "v" * 512}))["status"] == "in_progress"


def test_the_results_of_a_batch_have_a_bound() -> None:
    endpoint = batch_lines.ENDPOINTS[CHAT]
    results = batch_lines.ResultFiles(1000)
    for number in range(5):
        call = BatchCall(f"row {number}", "f", call=f"c{number}")
        record = CallRecord(id=call.call, function="f", revision=1, state=InvocationState.SUCCEEDED, submitted_at=0.0)
        results.add(call, batch_lines.ended_line(call, record, b'"' + b"x" * 200 + b'"', endpoint))
    rows = [msgspec.json.decode(row) for row in results.errors.splitlines()]
    assert len(results.output) <= 1000
    assert (results.completed, results.failed, results.completed > 0, len(rows)) == (
        5 - len(rows),
        len(rows),
        True,
        results.failed,
    )
    assert {(row["response"]["status_code"], row["response"]["body"]["error"]["code"]) for row in rows} == {
        (413, "payload_too_large")
    }
