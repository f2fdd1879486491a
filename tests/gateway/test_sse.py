from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gpufn.bus.calls import CallRequest, PendingStream
from gpufn.clock import SystemClock
from gpufn.errors import ErrorInfo, InvocationExpired
from gpufn.invocation import OutcomeKind
from gpufn.protocol.messages import InvocationMessage, ItemReply, ResultReply
from gpufn_gateway.sse import pump

URL = "/v1/functions/count/invoke"
EVENTS = "text/event-stream"
RECORDS = "application/vnd.gpufn.items"


class StubCaller:
    """What a PendingStream needs of its Caller."""

    def __init__(self) -> None:
        self.abandoned: list[str] = []
        self.credits: list[str] = []
        self._bus = self
        self._clock = SystemClock()

    def publish(self, subject: str, payload: bytes) -> None:
        self.credits.append(subject)

    def _forget(self, invocation: str) -> None: ...

    def _abandon(self, call: Any) -> None:
        self.abandoned.append(call.id)


@pytest.fixture
def streaming(gateway: Any, make: Any) -> Any:
    """A gateway whose function is a generator; its streams are real PendingStreams, kept in `gateway.streams`."""
    gateway.deploy(make.spec("count", make.generator()))
    gateway.caller = StubCaller()
    gateway.streams = []

    def open_stream(request: CallRequest) -> PendingStream:
        name = f"i{len(gateway.streams)}"
        message = InvocationMessage(name, "count", 1, request.method, request.content_type, "", "", 1000.0)
        stream = PendingStream(gateway.caller, message, asyncio.get_running_loop().create_future())
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


async def test_a_long_silence_is_filled(monkeypatch: pytest.MonkeyPatch, connection: Any) -> None:
    monkeypatch.setattr("gpufn_gateway.sse._HEARTBEAT_S", 0.001)
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


async def test_a_client_that_has_stopped_reading_is_given_up(
    monkeypatch: pytest.MonkeyPatch, streaming: Any, connection: Any, settle: Any
) -> None:
    monkeypatch.setattr("gpufn_gateway.sse._STALLED_S", 0.001)
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
