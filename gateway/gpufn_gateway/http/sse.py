"""Streams to a client: server-sent events, the SDK's records, and lines; each bounded by what the client reads.

`pump` writes at the client's pace (each `send` waits while its buffer is full) and stops when the client leaves.
`CallStream` is an invocation's items: the generator is given credit for more only as items leave here.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.encoding import media
from gpufn_core.encoding.media import RecordKind
from gpufn_core.errors import GpufnError, InvocationCancelled
from gpufn_core.protocol.messages import ResultReply
from gpufn_gateway import problems
from gpufn_gateway.calls.prepare import Calls, PreparedCall, leave
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.body_reader import Receive, Send, left
from gpufn_gateway.http.responses import call_headers
from gpufn_gateway.problems import Headers, Problem
from gpufn_gateway.submitted.resumable_streams import KeptStreams, Reader
from gpufn_platform.queue.call_records import request_digest
from gpufn_platform.queue.pending import PendingCall, PendingStream
from gpufn_platform.shared_bodies.bodies import ParcelReader

_HEARTBEAT_S: Final = 15.0  # proxies cut what is silent for longer
_STALLED_S: Final = 60.0  # a client that reads nothing for so long is gone, whatever its connection says
_AS_IT_COMES: Final[Headers] = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]  # past any proxy


class Events:
    """`text/event-stream`."""

    content_type: Final = f"{media.EVENTS}; charset=utf-8".encode()
    heartbeat: Final = b": waiting\n\n"

    def item(self, number: int, content_type: str, body: bytes) -> bytes:
        if content_type != media.JSON:
            # No item of a JSON stream; base64 in a JSON string keeps it whole.
            body = msgspec.json.encode(base64.b64encode(body).decode())
        return b"event: item\nid: %d\n%b\n" % (number, _data(body))

    def end(self, items: int) -> bytes:
        return b'event: end\ndata: {"items":%d}\n\n' % items

    def error(self, problem: Problem) -> bytes:
        return b"event: error\n%b\n" % _data(problem.body())


EVENT_HEADERS: Final[Headers] = [(b"content-type", Events.content_type), *_AS_IT_COMES]


class Records:
    """The SDK's stream, `gpufn_core.encoding.media.ITEMS`."""

    content_type: Final = media.ITEMS.encode()
    heartbeat: Final = b""

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
    """One invocation's items to one client, in the encoding that `accept` asks for."""

    def __init__(self, calls: Calls, call: PreparedCall, accept: bytes) -> None:
        self._calls = calls
        self._call = call
        self._encoding: Events | Records = Events() if b"event-stream" in accept else Records()
        self._streams = call.target.method.kind.streams

    async def run(self, receive: Receive, send: Send) -> None:
        """The call ends with the client. Raises GpufnError while nothing has been sent."""
        pending = self._calls.start_stream(self._call) if self._streams else self._calls.start(self._call)
        pending.future.add_done_callback(self._count)
        try:
            await self._send(pending, receive, send)
        finally:
            leave(pending)

    async def run_kept(self, kept: KeptStreams, key: str, after: int | None, receive: Receive, send: Send) -> None:
        """The client may come again, and go on behind item `after`. Raises as `run`."""
        call = self._call
        digest = request_digest(call.target.name, call.target.method.name, call.body)
        with kept.reading(key, digest, after, self._begin) as reader:
            await self._send(reader, receive, send)

    def _begin(self) -> PendingStream:
        pending = self._calls.start_stream(self._call)
        pending.future.add_done_callback(self._count)
        return pending

    async def _send(self, pending: PendingCall | Reader, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", self._encoding.content_type),
            *_AS_IT_COMES,
            *call_headers(pending.id, self._call.target.revision_header),
            *self._calls.limits(self._call),
        ]
        await pump(receive, send, headers, self._chunks(pending), heartbeat=self._encoding.heartbeat)

    async def _chunks(self, pending: PendingCall | Reader) -> AsyncIterator[bytes]:
        encoding = self._encoding
        try:
            if isinstance(pending, (PendingStream, Reader)):
                async with contextlib.aclosing(pending.items()) as arrived:  # type: ignore[type-var]
                    async for item, body in arrived:
                        yield encoding.item(item.number, item.content_type, body)
            reply, body = await pending.future
            result = self._calls.result(reply, body)
            if isinstance(result, ParcelReader):
                with result:
                    body = b"".join(result.parts())
        except GpufnError as error:
            yield encoding.error(problems.problem_of(self._calls.explained(self._call.target, error)))
            return
        if reply.kind is not OutcomeKind.SUCCEEDED:
            yield encoding.error(problems.from_outcome(reply.kind, reply.error))
            return
        if not self._streams:
            yield encoding.item(0, reply.content_type, body)
        yield encoding.end(reply.items if self._streams else 1)

    def _count(self, ended: asyncio.Future[tuple[ResultReply, bytes]]) -> None:
        stats = self._calls.telemetry.of(self._call.target.name)
        if ended.cancelled():
            return
        if (error := ended.exception()) is not None:
            stats.failed(error.code if isinstance(error, GpufnError) else "")
            return
        reply, _ = ended.result()
        stats.ended(reply, self._calls.clock.time() - self._call.now)


async def pump(
    receive: Receive,
    send: Send,
    headers: Headers,
    chunks: AsyncIterator[bytes],
    *,
    heartbeat: bytes = b"",
    is_head: bool = False,
) -> None:
    """Send `chunks` as they come until they end or the client leaves; `heartbeat` fills long silences. `is_head`: the
    request was HEAD, whose client would wait in vain for what it is not sent."""
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if is_head:
        await send({"type": "http.response.body", "body": b""})
        return
    writer = asyncio.ensure_future(_write(send, chunks))
    leaver = asyncio.ensure_future(left(receive))
    try:
        while True:
            done, _ = await asyncio.wait({writer, leaver}, timeout=_HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if done or writer.done():
                break
            if heartbeat:
                async with asyncio.timeout(_STALLED_S):
                    await send({"type": "http.response.body", "body": heartbeat, "more_body": True})
        if writer.done():
            writer.result()
            await send({"type": "http.response.body", "body": b""})
    except TimeoutError:
        raise InvocationCancelled("The client has stopped reading.") from None
    finally:
        for task in (writer, leaver):
            task.cancel()
        await asyncio.gather(writer, leaver, return_exceptions=True)


async def _write(send: Send, chunks: AsyncIterator[bytes]) -> None:
    async with contextlib.aclosing(chunks) as opened:  # type: ignore[type-var]
        async for chunk in opened:
            async with asyncio.timeout(_STALLED_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})


def _data(body: bytes) -> bytes:
    """A line break inside would end the field early."""
    return b"".join(b"data: %b\n" % line for line in body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"))
