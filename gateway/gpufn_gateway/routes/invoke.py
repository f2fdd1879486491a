"""The hot path: `POST /v1/functions/{fn}/invoke`, and `.../submit`: raw ASGI in front of the router.

No request object, no middleware, no task per call: one await on the reply. A client that leaves is noticed by `tick`,
which looks only at calls that have waited for a while. Measured on top of uvicorn: 17 µs per call.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import GpufnError, InvalidInput
from gpufn_core.protocol.messages import ResultReply
from gpufn_gateway import problems
from gpufn_gateway.calls.prepare import Calls, PreparedCall, leave
from gpufn_gateway.http.body_reader import Receive, Scope, Send, left
from gpufn_gateway.http.responses import OWN, Wording, call_headers, send_parts, send_problem, send_result, timing
from gpufn_gateway.http.sse import CallStream
from gpufn_gateway.problems import Headers
from gpufn_gateway.submitted.resumable_streams import KeptStreams
from gpufn_gateway.submitted.submit import WEBHOOK, Submissions, id_of_key
from gpufn_platform.queue.pending import PendingCall

# Sooner than this most calls are over, and a watcher would cost more than it saves.
_WATCH_AFTER_S: Final = 0.2
_LONGEST_NUMBER: Final = 18


class _Flight:
    """A call whose client waits. `watcher` reads the connection for its end, once the call is slow."""

    __slots__ = ("call", "receive", "watcher")

    def __init__(self, call: PendingCall, receive: Receive) -> None:
        self.call = call
        self.receive = receive
        self.watcher: asyncio.Task[None] | None = None

    async def watch(self) -> None:
        await left(self.receive)
        self.call.cancel()


class Invoke:
    def __init__(self, calls: Calls, submissions: Submissions) -> None:
        self._calls = calls
        self._submissions = submissions
        self._flights: set[_Flight] = set()
        self._kept = KeptStreams(calls.clock)

    async def serve(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises GpufnError while nothing has been sent."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        prefer = headers.get(b"prefer")
        if prefer is not None and b"respond-async" in prefer:
            await self._submissions.submit(name, headers, receive, send, query=scope["query_string"])
            return
        if WEBHOOK in headers:
            raise InvalidInput(
                "a webhook is for a call that nobody waits for: add 'Prefer: respond-async', or POST to .../submit",
                field="X-Gpufn-Webhook",
            )
        accept = headers.get(b"accept")
        if accept is not None and (b"event-stream" in accept or b"gpufn.items" in accept):
            call = await self._calls.prepare(name, headers, receive, query=scope["query_string"])
            await self._stream(call, headers, accept, receive, send)
            return
        if b"idempotency-key" in headers:
            await self._submissions.invoke(name, headers, receive, send, scope["query_string"])
            return
        call = await self._calls.prepare(name, headers, receive, may_be_parcel=True, query=scope["query_string"])
        await self.answer(call, receive, send, OWN)

    async def _stream(
        self, call: PreparedCall, headers: dict[bytes, bytes], accept: bytes, receive: Receive, send: Send
    ) -> None:
        stream = CallStream(self._calls, call, accept)
        id_ = id_of_key(call.target.name, call.principal, headers.get(b"idempotency-key"))
        if id_ is None:
            try:
                await stream.run(receive, send)
            finally:
                self._calls.discard(call)
        elif call.target.method.kind.streams:
            await stream.run_kept(self._kept, id_, _last_event(headers.get(b"last-event-id")), receive, send)
        else:
            what = (
                f"{call.target.name} is no generator, whose stream could be taken up again: leave out Idempotency-Key"
            )
            raise InvalidInput(what, field="Idempotency-Key")

    async def submit(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        await self._submissions.submit(name, headers, receive, send, query=scope["query_string"])

    async def answer(self, call: PreparedCall, receive: Receive, send: Send, wording: Wording) -> None:
        """Start a call and tell its end to the client, who may leave before."""
        try:
            await self._answer(call, receive, send, wording)
        finally:
            self._calls.discard(call)

    async def _answer(self, call: PreparedCall, receive: Receive, send: Send, wording: Wording) -> None:
        pending = self._calls.start(call)
        flight = _Flight(pending, receive)
        self._flights.add(flight)
        try:
            reply, body = await pending.future
        except GpufnError as error:
            await self._failed(call, pending, error, send, wording)
            return
        finally:
            self._flights.discard(flight)
            if flight.watcher is not None:
                flight.watcher.cancel()
            leave(pending)
        await self._ended(call, reply, body, send, wording)

    def tick(self, now: float) -> None:
        """Watch the clients of slow calls, and those of streams that may come again. `now` is monotonic; call it about
        ten times a second."""
        self._kept.sweep(now)
        for flight in self._flights:
            if flight.watcher is None and now - flight.call.since > _WATCH_AFTER_S:
                flight.watcher = asyncio.get_running_loop().create_task(flight.watch(), name="client of a slow call")

    async def _ended(self, call: PreparedCall, reply: ResultReply, body: bytes, send: Send, wording: Wording) -> None:
        took_s = self._calls.clock.time() - call.now
        about = [
            *call_headers(reply.invocation, call.target.revision_header),
            *timing(reply.queue_s, reply.gather_s, reply.run_s, reply.gpu_s, reply.cold_start),
            *self._calls.limits(call),
        ]
        try:
            if reply.kind is OutcomeKind.SUCCEEDED and reply.reference is not None:
                await self._send_stored(reply, send, wording, about)
            elif reply.kind is OutcomeKind.SUCCEEDED:
                result = self._calls.result(reply, body)
                await send_result(send, wording, reply.content_type, result, about)
            else:
                await send_problem(send, wording, problems.from_outcome(reply.kind, reply.error), about)
        finally:  # counted behind the answer, which somebody waits for
            self._calls.telemetry.of(call.target.name).ended(reply, took_s)

    async def _send_stored(self, reply: ResultReply, send: Send, wording: Wording, about: Headers) -> None:
        """A result that was too large for the reply: its runner is on another host."""
        parts, reference = self._calls.stored_result(reply), reply.reference
        assert parts is not None
        assert reference is not None
        try:
            await send_parts(send, wording, reply.content_type, parts, about, size=reference.size)
        finally:
            self._calls.discard_result(reply)

    async def _failed(
        self, call: PreparedCall, pending: PendingCall, error: GpufnError, send: Send, wording: Wording
    ) -> None:
        error = self._calls.explained(call.target, error)
        self._calls.telemetry.of(call.target.name).failed(error.code)
        about = [(b"x-gpufn-invocation", pending.id.encode()), *self._calls.limits(call)]
        await send_problem(send, wording, problems.problem_of(error), about)


def _last_event(header: bytes | None) -> int | None:
    """The number of the last item that a reader has. Raises InvalidInput."""
    if header is None:
        return None
    if not header.isdigit() or len(header) > _LONGEST_NUMBER:
        raise InvalidInput("Last-Event-ID is the id of the last item that came, a whole number", field="Last-Event-ID")
    return int(header)
