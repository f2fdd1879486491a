"""Streaming responses: server-sent events, the SDK's records, and lines, all with backpressure from the client.

`pump` writes at the client's pace (each `send` waits while its buffer is full) and stops when the client disconnects.
`CallStream` sends an invocation's items: the generator gets credit for more only as items are sent.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Final, Protocol

import msgspec

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.encoding import media
from gpufn_core.encoding.media import RecordKind
from gpufn_core.errors import GpufnError, InvocationCancelled
from gpufn_core.protocol.messages import ResultReply
from gpufn_gateway import problems
from gpufn_gateway.calls.prepare import Calls, cancel_unless_ended
from gpufn_gateway.calls.prepared_call import PreparedCall
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.body_reader import Receive, Send, wait_for_disconnect
from gpufn_gateway.http.responses import call_headers
from gpufn_gateway.problems import Headers, Problem
from gpufn_gateway.submitted.resumable_streams import ResumableStreams, StreamReader
from gpufn_platform.queue.pending import PendingCall, PendingStream
from gpufn_platform.queue.records.call_records import request_digest
from gpufn_platform.shared_bodies.bodies import SharedBodyReader

_HEARTBEAT_S: Final = 15.0  # proxies close connections that are silent for longer
_STALL_TIMEOUT_S: Final = 60.0  # a client that reads nothing for this long counts as disconnected
_NO_BUFFERING: Final = (b"x-accel-buffering", b"no")  # for proxies


class StreamEncoding(Protocol):
    """How a protocol writes the items of a stream, its end, and an error after its start."""

    content_type: bytes
    heartbeat: bytes

    def item(self, number: int, content_type: str, body: bytes) -> bytes: ...

    def end(self, items: int) -> bytes: ...

    def error(self, problem: Problem) -> bytes: ...


class Events:
    """`text/event-stream`."""

    content_type = f"{media.EVENTS}; charset=utf-8".encode()
    heartbeat = b": waiting\n\n"

    def item(self, number: int, content_type: str, body: bytes) -> bytes:
        if content_type != media.JSON:
            # The item is not JSON: send it as base64 in a JSON string.
            body = msgspec.json.encode(base64.b64encode(body).decode())
        return b"event: item\nid: %d\n%b\n" % (number, _data(body))

    def end(self, items: int) -> bytes:
        return b'event: end\ndata: {"items":%d}\n\n' % items

    def error(self, problem: Problem) -> bytes:
        return b"event: error\n%b\n" % _data(problem.body())


EVENT_HEADERS: Final[Headers] = [(b"content-type", Events.content_type), _NO_BUFFERING]


class Records:
    """The SDK's stream format, `gpufn_core.encoding.media.ITEMS`."""

    content_type = media.ITEMS.encode()
    heartbeat = b""

    def item(self, number: int, content_type: str, body: bytes) -> bytes:
        return self._record(RecordKind.ITEM, content_type, body)

    def end(self, items: int) -> bytes:
        return self._record(RecordKind.END, "", b"")

    def error(self, problem: Problem) -> bytes:
        return self._record(RecordKind.ERROR, media.PROBLEM, problem.body())

    def _record(self, kind: RecordKind, content_type: str, body: bytes) -> bytes:
        name = negotiation.clean(content_type).encode() if content_type else b""
        return b"".join((media.RECORD.pack(kind, len(name), len(body)), name, body))


class CallStream:
    """Stream one invocation's items to one client."""

    def __init__(self, calls: Calls, call: PreparedCall, encoding: StreamEncoding) -> None:
        self._calls = calls
        self._call = call
        self._encoding = encoding
        self._streams = call.target.method.kind.streams

    async def run(self, receive: Receive, send: Send) -> None:
        """Run the call; a disconnect cancels it. Raises GpufnError before the response has started."""
        pending = self._calls.start_stream(self._call) if self._streams else self._calls.start(self._call)
        pending.future.add_done_callback(functools.partial(self._count, pending.id))
        try:
            await self._send(pending, receive, send)
        finally:
            cancel_unless_ended(pending)

    async def run_resumable(
        self, streams: ResumableStreams, key: str, after: int | None, receive: Receive, send: Send
    ) -> None:
        """Run the call so that a client can reconnect and continue after item `after`. Raises as `run`."""
        call = self._call
        digest = request_digest(call.target.name, call.target.method.name, call.body.data)
        with streams.reading(key, digest, after, self._start) as reader:
            await self._send(reader, receive, send)

    def _start(self) -> PendingStream:
        pending = self._calls.start_stream(self._call)
        pending.future.add_done_callback(functools.partial(self._count, pending.id))
        return pending

    async def _send(self, pending: PendingCall | StreamReader, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", self._encoding.content_type),
            _NO_BUFFERING,
            *call_headers(pending.id, self._call.target.revision_header),
            *self._calls.limits(self._call),
        ]
        await pump(receive, send, headers, self._chunks(pending), heartbeat=self._encoding.heartbeat)

    async def _chunks(self, pending: PendingCall | StreamReader) -> AsyncIterator[bytes]:
        encoding = self._encoding
        try:
            if isinstance(pending, (PendingStream, StreamReader)):
                async with contextlib.aclosing(pending.items()) as items:  # type: ignore[type-var]
                    async for item, body in items:
                        yield encoding.item(item.number, item.content_type, body)
            reply, body = await pending.future
            result = self._calls.result(reply, body)
            if isinstance(result, SharedBodyReader):
                with result:
                    body = b"".join(result.parts())
        except GpufnError as error:
            yield encoding.error(problems.problem_of(self._calls.explain(self._call, error)))
            return
        if reply.kind is not OutcomeKind.SUCCEEDED:
            yield encoding.error(problems.from_outcome(reply.kind, reply.error))
            return
        if not self._streams:
            yield encoding.item(0, reply.content_type, body)
        yield encoding.end(reply.items if self._streams else 1)

    def _count(self, invocation: str, ended: asyncio.Future[tuple[ResultReply, bytes]]) -> None:
        stats, tracing = self._calls.telemetry.of(self._call.target.name), self._calls.tracing
        if ended.cancelled():
            return
        if (error := ended.exception()) is not None:
            stats.count_failure(error.code if isinstance(error, GpufnError) else "")
            if tracing is not None:
                tracing.failed(self._call, invocation, error)
            return
        reply, _ = ended.result()
        ended_at = self._calls.clock.time()
        stats.count_end(reply, ended_at - self._call.now, ended_at, self._call.trace)
        if tracing is not None:
            tracing.ended(self._call, reply, ended_at)


async def pump(
    receive: Receive,
    send: Send,
    headers: Headers,
    chunks: AsyncIterator[bytes],
    *,
    heartbeat: bytes = b"",
    is_head: bool = False,
) -> None:
    """Send `chunks` as they arrive until they end or the client disconnects; send `heartbeat` during long silences.

    For HEAD (`is_head`) only the headers are sent.
    """
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if is_head:
        await send({"type": "http.response.body", "body": b""})
        return
    writer = asyncio.ensure_future(_write(send, chunks))
    disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        while True:
            done, _ = await asyncio.wait(
                {writer, disconnect}, timeout=_HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if done or writer.done():
                break
            if heartbeat:
                async with asyncio.timeout(_STALL_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": heartbeat, "more_body": True})
        if writer.done():
            writer.result()
            await send({"type": "http.response.body", "body": b""})
    except TimeoutError:
        raise InvocationCancelled("The client stopped reading.") from None
    finally:
        for task in (writer, disconnect):
            task.cancel()
        await asyncio.gather(writer, disconnect, return_exceptions=True)


async def _write(send: Send, chunks: AsyncIterator[bytes]) -> None:
    async with contextlib.aclosing(chunks) as source:  # type: ignore[type-var]
        async for chunk in source:
            async with asyncio.timeout(_STALL_TIMEOUT_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})


def _data(body: bytes) -> bytes:
    """Write one `data:` field per line: a line break inside a field would end it early."""
    return b"".join(b"data: %b\n" % line for line in body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"))
