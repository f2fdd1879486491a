from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import ErrorInfo, InvocationExpired
from gpufn_core.protocol.messages import InvocationMessage, ItemReply, ResultReply, StreamCredit
from gpufn_core.protocol.reports import Waiting, WaitReason
from gpufn_gateway.http.sse import pump
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.pending import PendingCall, PendingStream

URL = "/v1/functions/count/invoke"
EVENTS = "text/event-stream"
RECORDS = "application/vnd.gpufn.items"


class StubCaller:
    """The part of the Caller that a PendingStream uses."""

    def __init__(self) -> None:
        self.abandoned: list[str] = []
        self.credits: list[str] = []

    def give_credit(self, to: str, credit: StreamCredit) -> None:
        self.credits.append(to)

    def forget(self, invocation: str) -> None: ...

    def abandon(self, call: PendingCall) -> None:
        self.abandoned.append(call.id)


@pytest.fixture
def streaming(gateway: Any, make: Any) -> Any:
    """A gateway whose function is a generator; its streams are real PendingStreams, listed in `gateway.streams`."""
    gateway.deploy(make.spec("count", make.generator()))
    gateway.caller = StubCaller()
    gateway.streams = []

    def open_stream(request: CallRequest) -> PendingStream:
        name = f"i{len(gateway.streams)}"
        message = InvocationMessage(name, "count", 1, request.method, request.content_type, "", "", 1000.0)
        stream = PendingStream(gateway.caller, message, SystemClock())
        gateway.streams.append(stream)
        return stream

    gateway.queue.open_stream = open_stream
    return gateway


def item(stream: PendingStream, number: int, body: bytes, content_type: str = "application/json") -> None:
    stream.take(ItemReply(stream.id, number, content_type, "credits"), body)


def end(stream: PendingStream, items: int, kind: OutcomeKind = OutcomeKind.SUCCEEDED, error: Any = None) -> None:
    stream.take(ResultReply(stream.id, kind, error, "", 1, 1, 0.0, 0.0, items=items), b"")


async def test_items_are_events_with_numbers_and_an_end(streaming: Any, connection: Any, settle: Any) -> None:
    client = connection(URL, accept=EVENTS)
    task = client.start(streaming.app)
    await settle()
    (stream,) = streaming.streams
    assert client.sent[0]["status"] == 200, "the head goes out before the first item"
    item(stream, 0, b'{"a":1}')
    await settle()
    assert client.body == b'event: item\nid: 0\ndata: {"a":1}\n\n'
    item(stream, 1, b"[1,\n2]")
    item(stream, 2, b"\x00", "application/octet-stream")
    end(stream, 3)
    await task
    assert client.body.split(b"\n\n")[1:] == [
        b"event: item\nid: 1\ndata: [1,\ndata: 2]",
        b'event: item\nid: 2\ndata: "AA=="',
        b'event: end\ndata: {"items":3}',
        b"",
    ]
    headers = dict(client.sent[0]["headers"])
    assert (headers[b"content-type"], headers[b"x-gpufn-invocation"]) == (b"text/event-stream; charset=utf-8", b"i0")
    assert client.sent[-1] == {"type": "http.response.body", "body": b""}


async def test_items_are_records_for_the_sdk(streaming: Any, connection: Any, settle: Any) -> None:
    client = connection(URL, accept=RECORDS)
    task = client.start(streaming.app)
    await settle()
    item(streaming.streams[0], 0, b"\x01\x02", "application/vnd.gpufn.msgpack")
    end(streaming.streams[0], 1, OutcomeKind.RAISED, ErrorInfo("function_raised", "no", error_type="KeyError"))
    await task
    records, data = [], client.body
    while data:
        kind, name, size = struct.unpack_from("!BBI", data)
        records.append((kind, data[6 : 6 + name], data[6 + name : 6 + name + size]))
        data = data[6 + name + size :]
    assert records[0] == (0, b"application/vnd.gpufn.msgpack", b"\x01\x02")
    assert records[1][:2] == (2, b"application/problem+json")
    problem = msgspec.json.decode(records[1][2])
    assert (problem["code"], problem["status"], problem["error_type"]) == ("function_raised", 500, "KeyError")


async def test_a_stream_that_fails_ends_with_an_error_event(streaming: Any, connection: Any, settle: Any) -> None:
    client = connection(URL, accept=EVENTS)
    task = client.start(streaming.app)
    await settle()
    streaming.streams[0].fail(InvocationExpired("too late"))
    await task
    event, data = client.body.split(b"\n")[:2]
    assert (event, msgspec.json.decode(data.removeprefix(b"data: "))["code"]) == (
        b"event: error",
        "invocation_expired",
    )


async def test_a_stream_that_never_began_names_the_reason_of_its_wait(
    streaming: Any, make: Any, connection: Any, settle: Any
) -> None:
    client = connection(URL, accept=EVENTS)
    task = client.start(streaming.app)
    await settle()
    streaming.report(make.status("count", ready=0, waiting=Waiting(WaitReason.NO_CAPACITY, "vm: it has no L4 GPU")))
    streaming.streams[0].fail(InvocationExpired("too late"))
    await task
    assert b"too late: count waits, vm: it has no L4 GPU" in client.body


async def test_a_function_that_does_not_stream_is_a_stream_of_one(gateway: Any, connection: Any) -> None:
    client = connection("/v1/functions/embed/invoke", b'{"texts":[]}', accept=EVENTS)
    await client.start(gateway.app)
    assert client.body == b'event: item\nid: 0\ndata: {"texts":[]}\n\nevent: end\ndata: {"items":1}\n\n'


async def test_a_stream_that_cannot_begin_is_a_problem(streaming: Any, connection: Any) -> None:
    client = connection(URL, b"{bad", accept=EVENTS)
    await client.start(streaming.app)
    assert client.sent[0]["status"] == 422


@pytest.mark.parametrize("accept", [EVENTS, RECORDS])
async def test_a_client_that_leaves_cancels_its_stream(
    streaming: Any, connection: Any, settle: Any, accept: str
) -> None:
    client = connection(URL, accept=accept)
    task = client.start(streaming.app)
    await settle()
    item(streaming.streams[0], 0, b"1")
    client.left.set()
    await task
    assert streaming.caller.abandoned == ["i0"]


async def test_leaving_a_plain_call_behind_cancels_it_too(gateway: Any, connection: Any, settle: Any) -> None:
    gateway.queue.answer = lambda call: None
    client = connection("/v1/functions/embed/invoke", b'{"texts":[]}', accept=EVENTS)
    task = client.start(gateway.app)
    await settle()
    client.left.set()
    await task
    assert gateway.queue.calls[0].cancelled


async def test_a_client_that_does_not_read_holds_the_generator_back(
    streaming: Any, connection: Any, settle: Any
) -> None:
    client = connection(URL, accept=EVENTS)
    gate = asyncio.Event()
    send = client.send

    async def slow_send(message: Any) -> None:
        await send(message)
        if message["type"] == "http.response.body" and message.get("more_body"):
            await gate.wait()

    client.send = slow_send
    task = client.start(streaming.app)
    await settle()
    (stream,) = streaming.streams
    for number in range(64):
        item(stream, number, b"1")
    await settle()
    assert (client.body.count(b"event: item"), streaming.caller.credits) == (1, [])
    gate.set()
    await settle()
    assert (client.body.count(b"event: item"), streaming.caller.credits) == (64, ["credits", "credits"])
    end(stream, 64)
    await task


class ResumableStream:
    """A stream that clients read one after the other with its key; `place` is its index in `gateway.streams`."""

    def __init__(self, streaming: Any, connection: Any, settle: Any, *, key: str = "k", place: int = 0) -> None:
        self.streaming = streaming
        self._key = key
        self._place = place
        self._connection = connection
        self._settle = settle

    async def read(self, body: bytes = b"{}", **headers: str) -> Any:
        """Return a client that received the items so far and then disconnected."""
        client = self._connection(URL, body, accept=EVENTS, idempotency_key=self._key, **headers)
        task = client.start(self.streaming.app)
        await self._settle()
        client.left.set()
        await task
        return client

    async def ids(self, **headers: str) -> list[int]:
        body = (await self.read(b"{}", **headers)).body
        return [int(line[4:]) for line in body.splitlines() if line.startswith(b"id: ")]

    async def refusal(self, body: bytes = b"{}", **headers: str) -> tuple[int, str]:
        client = await self.read(body, **headers)
        return client.sent[0]["status"], msgspec.json.decode(client.body)["code"]

    def items(self, numbers: range) -> None:
        for number in numbers:
            item(self.streaming.streams[self._place], number, b"1234")


@pytest.fixture
def kept(streaming: Any, connection: Any, settle: Any) -> ResumableStream:
    return ResumableStream(streaming, connection, settle)


async def test_a_stream_with_a_key_continues_after_the_items_of_its_reader(kept: ResumableStream) -> None:
    assert await kept.ids() == []
    kept.items(range(3))
    assert await kept.ids() == [0, 1, 2]
    kept.items(range(3, 5))
    assert await kept.ids(last_event_id="0") == [1, 2, 3, 4]
    assert await kept.ids(last_event_id="4") == []
    end(kept.streaming.streams[0], 5)
    assert (await kept.read(last_event_id="3")).body.endswith(b'event: end\ndata: {"items":5}\n\n')
    assert (len(kept.streaming.streams), kept.streaming.caller.abandoned) == (1, [])


async def test_the_end_has_the_number_of_items_even_for_a_complete_reader(kept: ResumableStream) -> None:
    await kept.ids()
    kept.items(range(2))
    end(kept.streaming.streams[0], 2)
    assert (await kept.read(last_event_id="1")).body == b'event: end\ndata: {"items":2}\n\n'


async def test_a_kept_stream_without_a_reader_waits_a_minute(kept: ResumableStream) -> None:
    await kept.ids()
    kept.streaming.clock.now += 59
    kept.streaming.invoke.tick(kept.streaming.clock.now)
    assert kept.streaming.caller.abandoned == []
    kept.streaming.clock.now += 2
    kept.streaming.invoke.tick(kept.streaming.clock.now)
    assert kept.streaming.caller.abandoned == ["i0"]
    assert await kept.refusal(last_event_id="0") == (404, "invocation_not_found")
    await kept.ids()
    assert len(kept.streaming.streams) == 2


async def test_a_kept_stream_is_at_most_a_window_ahead_of_its_readers(kept: ResumableStream, settle: Any) -> None:
    await kept.ids()
    kept.items(range(128))
    await settle()
    assert len(kept.streaming.caller.credits) == 2, "64 are taken, and 64 are under way"
    assert await kept.ids() == list(range(128))
    assert len(kept.streaming.caller.credits) == 4


async def test_a_kept_stream_that_cannot_continue_reports_it(
    kept: ResumableStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufn_gateway.submitted.resumable_streams._STREAM_BYTES", 2 * (4 + 400))
    assert await kept.refusal(last_event_id="0") == (404, "invocation_not_found")
    assert await kept.refusal(last_event_id="-1") == (422, "invalid_input")
    await kept.ids()
    kept.items(range(4))
    await kept.ids()
    assert await kept.ids(last_event_id="1") == [2, 3]
    assert await kept.refusal(last_event_id="0") == (409, "conflict")
    assert await kept.refusal(last_event_id="9") == (409, "conflict")
    assert await kept.refusal(b'{"n":2}') == (409, "idempotency_mismatch")


async def test_small_items_of_a_kept_stream_are_not_kept_for_ever(
    kept: ResumableStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of 4 bytes takes 400 bytes of memory."""
    monkeypatch.setattr("gpufn_gateway.submitted.resumable_streams._STREAM_BYTES", 1000)
    await kept.ids()
    kept.items(range(4))
    assert await kept.ids() == [0, 1, 2, 3]
    assert await kept.refusal(last_event_id="0") == (409, "conflict")


async def test_the_memory_of_all_kept_streams_is_bounded(
    kept: ResumableStream, connection: Any, settle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: no stream started beyond the limit, but existing ones still grew to 16 MiB each."""
    monkeypatch.setattr("gpufn_gateway.submitted.resumable_streams._MAX_TOTAL_BYTES", 20)
    monkeypatch.setattr("gpufn_gateway.submitted.resumable_streams._ITEM_OVERHEAD_BYTES", 0)
    other = ResumableStream(kept.streaming, connection, settle, key="other", place=1)
    for stream in (kept, other):
        await stream.ids()
        stream.items(range(4))
    assert await kept.ids() == [0, 1, 2, 3]
    assert await kept.refusal(last_event_id="1") == (409, "conflict")
    assert await kept.ids(last_event_id="3") == []
    assert await other.ids() == [0, 1, 2, 3]
    kept.streaming.clock.now += 61
    kept.streaming.invoke.tick(kept.streaming.clock.now)
    again = ResumableStream(kept.streaming, connection, settle, key="again", place=2)
    await again.ids()
    again.items(range(4))
    assert await again.ids() == [0, 1, 2, 3]
    assert await again.ids(last_event_id="0") == [1, 2, 3], "forgotten streams do not count"


async def test_only_a_generators_stream_can_be_taken_up_again(gateway: Any, connection: Any) -> None:
    client = connection("/v1/functions/embed/invoke", b'{"texts":[]}', accept=EVENTS, idempotency_key="k")
    await client.start(gateway.app)
    assert (client.sent[0]["status"], b"is not a generator" in client.body) == (422, True)


async def test_a_long_silence_is_filled(monkeypatch: pytest.MonkeyPatch, connection: Any) -> None:
    monkeypatch.setattr("gpufn_gateway.http.sse._HEARTBEAT_S", 0.001)
    client = connection("/")
    beats = asyncio.Event()

    async def send(message: Any) -> None:
        await client.send(message)
        if message.get("body") == b": waiting\n\n":
            beats.set()

    async def chunks() -> AsyncIterator[bytes]:
        await beats.wait()
        yield b"done"

    client._body.clear()
    await pump(client.receive, send, [], chunks(), heartbeat=b": waiting\n\n")
    assert client.body.startswith(b": waiting\n\n")
    assert client.body.endswith(b"done")


async def test_a_client_that_has_stopped_reading_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, streaming: Any, connection: Any, settle: Any
) -> None:
    monkeypatch.setattr("gpufn_gateway.http.sse._STALL_TIMEOUT_S", 0.001)
    client = connection(URL, accept=EVENTS)
    send = client.send

    async def stuck_send(message: Any) -> None:
        if client.sent and client.sent[0]["type"] == "http.response.start":
            if message["type"] == "http.response.start":
                raise RuntimeError("the answer has begun")
            await asyncio.Event().wait()
        await send(message)

    client.send = stuck_send
    task = client.start(streaming.app)
    await settle()
    item(streaming.streams[0], 0, b"1")
    await task
    assert streaming.caller.abandoned == ["i0"]
