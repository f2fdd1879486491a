"""The hot path: `POST /v1/functions/{fn}/invoke` and `.../submit`, as raw ASGI in front of the router.

There is no request object, no middleware and no task per call, only one await of the reply. `tick` detects clients that
disconnect, and it watches only calls that have waited for a while. Measured overhead over uvicorn: 17 µs per call.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import GpufnError, InvalidInput
from gpufn_core.protocol.messages import ResultReply
from gpufn_gateway import problems
from gpufn_gateway.calls.prepare import Calls, cancel_unless_ended
from gpufn_gateway.calls.prepared_call import PreparedCall
from gpufn_gateway.http.body_reader import Receive, Scope, Send, wait_for_disconnect
from gpufn_gateway.http.responses import (
    GPUFN_FORMAT,
    ResponseFormat,
    call_headers,
    send_parts,
    send_problem,
    send_result,
    timing,
)
from gpufn_gateway.http.sse import CallStream, Events, Records
from gpufn_gateway.problems import Headers
from gpufn_gateway.submitted.resumable_streams import ResumableStreams
from gpufn_gateway.submitted.submit import WEBHOOK, Submissions, id_of_key
from gpufn_platform.queue.pending import PendingCall

# Most calls end earlier than this, and a watcher would cost more than it saves.
_WATCH_AFTER_S: Final = 0.2
_MAX_DIGITS: Final = 18
_SUCCEEDED: Final = OutcomeKind.SUCCEEDED  # each call needs it, and Python looks up a member of an enum slowly


class _CallInFlight:
    """A call whose client waits. Once the call is slow, `watcher` waits for the client to disconnect."""

    __slots__ = ("call", "receive", "watcher")

    def __init__(self, call: PendingCall, receive: Receive) -> None:
        self.call = call
        self.receive = receive
        self.watcher: asyncio.Task[None] | None = None

    async def watch(self) -> None:
        await wait_for_disconnect(self.receive)
        self.call.cancel()


class Invoke:
    def __init__(self, calls: Calls, submissions: Submissions) -> None:
        self.calls = calls
        self._submissions = submissions
        self._in_flight: set[_CallInFlight] = set()
        self._streams = ResumableStreams(calls.clock)

    async def serve(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an invoke request. Raises GpufnError before the response has started."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        prefer = headers.get(b"prefer")
        if prefer is not None and b"respond-async" in prefer:
            await self._submissions.submit(name, headers, receive, send, query=scope["query_string"])
            return
        if WEBHOOK in headers:
            raise InvalidInput(
                "a webhook works only with submitted calls: add 'Prefer: respond-async', or POST to .../submit",
                field="X-Gpufn-Webhook",
            )
        accept = headers.get(b"accept")
        if accept is not None and (b"event-stream" in accept or b"gpufn.items" in accept):
            call = await self.calls.prepare(name, headers, receive, query=scope["query_string"])
            await self._stream(call, headers, accept, receive, send)
            return
        if b"idempotency-key" in headers:
            await self._submissions.invoke(name, headers, receive, send, scope["query_string"])
            return
        call = await self.calls.prepare(name, headers, receive, may_share=True, query=scope["query_string"])
        await self.respond(call, receive, send, GPUFN_FORMAT)

    async def _stream(
        self, call: PreparedCall, headers: dict[bytes, bytes], accept: bytes, receive: Receive, send: Send
    ) -> None:
        stream = CallStream(self.calls, call, Events() if b"event-stream" in accept else Records())
        key = id_of_key(call.target.name, call.principal, headers.get(b"idempotency-key"))
        if key is None:
            try:
                await stream.run(receive, send)
            finally:
                self.calls.discard(call)
        elif call.target.method.kind.streams:
            await stream.run_resumable(self._streams, key, _last_event_id(headers.get(b"last-event-id")), receive, send)
        else:
            message = f"{call.target.name} is not a generator, so its stream cannot be resumed: omit Idempotency-Key"
            raise InvalidInput(message, field="Idempotency-Key")

    async def submit(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        await self._submissions.submit(name, headers, receive, send, query=scope["query_string"])

    async def respond(self, call: PreparedCall, receive: Receive, send: Send, response_format: ResponseFormat) -> None:
        """Start a call and send its outcome to the client. A disconnect cancels the call."""
        try:
            pending = self.calls.start(call)
            in_flight = _CallInFlight(pending, receive)
            self._in_flight.add(in_flight)
            try:
                reply, body = await pending.future
            except GpufnError as error:
                await self._send_error(call, pending, error, send, response_format)
                return
            finally:
                self._in_flight.discard(in_flight)
                if in_flight.watcher is not None:
                    in_flight.watcher.cancel()
                cancel_unless_ended(pending)
            await self._send_reply(call, reply, body, send, response_format)
        finally:
            self.calls.discard(call)

    def tick(self, now: float) -> None:
        """Watch the clients of slow calls, and close idle resumable streams.

        `now` is monotonic. Call it about ten times a second.
        """
        self._streams.sweep(now)
        for in_flight in self._in_flight:
            if in_flight.watcher is None and now - in_flight.call.since > _WATCH_AFTER_S:
                in_flight.watcher = asyncio.get_running_loop().create_task(
                    in_flight.watch(), name="client of a slow call"
                )

    async def _send_reply(
        self, call: PreparedCall, reply: ResultReply, body: bytes, send: Send, response_format: ResponseFormat
    ) -> None:
        ended_at = self.calls.clock.time()
        headers = [
            *call_headers(reply.invocation, call.target.revision_header),
            *timing(reply.queue_s, reply.gather_s, reply.run_s, reply.gpu_s, reply.cold_start),
            *self.calls.limits(call),
        ]
        try:
            if reply.kind is not _SUCCEEDED:
                await send_problem(send, response_format, problems.from_outcome(reply.kind, reply.error), headers)
            elif reply.reference is not None:
                await self._send_stored(reply, send, response_format, headers)
            else:
                result = self.calls.result(reply, body)
                await send_result(send, response_format, reply.content_type, result, headers)
        finally:  # counted after the response, so that it is not delayed
            self.calls.telemetry.of(call.target.name).count_end(reply, ended_at - call.now, ended_at, call.trace)
            if self.calls.tracing is not None:
                self.calls.tracing.ended(call, reply, ended_at)

    async def _send_stored(
        self, reply: ResultReply, send: Send, response_format: ResponseFormat, headers: Headers
    ) -> None:
        """Send a result that was too large for the reply. Its runner is on another host."""
        parts, reference = self.calls.stored_result(reply), reply.reference
        assert parts is not None
        assert reference is not None
        try:
            await send_parts(send, response_format, reply.content_type, parts, headers, size=reference.size)
        finally:
            self.calls.discard_result(reply)

    async def _send_error(
        self, call: PreparedCall, pending: PendingCall, error: GpufnError, send: Send, response_format: ResponseFormat
    ) -> None:
        error = self.calls.explain(call, error)
        self.calls.telemetry.of(call.target.name).count_failure(error.code)
        if self.calls.tracing is not None:
            self.calls.tracing.failed(call, pending.id, error)
        headers = [(b"x-gpufn-invocation", pending.id.encode()), *self.calls.limits(call)]
        await send_problem(send, response_format, problems.problem_of(error), headers)


def _last_event_id(header: bytes | None) -> int | None:
    """Parse Last-Event-ID: the number of the last item that the client received. Raises InvalidInput."""
    if header is None:
        return None
    if not header.isdigit() or len(header) > _MAX_DIGITS:
        raise InvalidInput(
            "Last-Event-ID must be the id of the last item that was received, an integer", field="Last-Event-ID"
        )
    return int(header)
