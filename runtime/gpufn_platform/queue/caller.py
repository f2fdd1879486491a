"""Caller: publish invocations and await their replies. The gateway and each runner own one Caller.

1. `invoke` offers the call to the fast path, if there is one and it has room. Otherwise, or if the fast path refuses
   it, the call is published to the function's sync queue.
2. The stream's PubAck and the reply arrive on the same subject, which ends in the invocation's id. A PubAck is JSON and
   starts with a brace, which a reply never does. A PubAck with an error ends the call at once (QueueFull); otherwise it
   reports where the message is stored. A runner that queues the next attempt reports it in the same format.
   While the stream has no leader (an election, a restart), the server reports that it stored nothing. `tick` then
   publishes the message again, for `_STORE_TIMEOUT_S` at most.
3. The runner's ResultReply ends the call, whatever the outcome; the caller reads its kind.
4. Runners periodically query whether a caller still waits for their running calls, because a cancellation may have been
   lost with a broken connection.
5. `tick` ends calls whose deadline has passed, and calls whose queue timeout has passed (`lost_call_lookup`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from gpufn_core.domain.invocation import END_REPORT_WITHIN_S
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import BusUnavailable, GpufnError, InvocationExpired, ProtocolMismatch
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import (
    CallInput,
    Cancel,
    InvocationMessage,
    Reply,
    ResultReply,
    StreamCredit,
    WaitCheck,
    unpack_reply,
)
from gpufn_core.spec.priority import Priority, QueueKind
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus, Message, is_inbox
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import wakeups
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.lost_call_lookup import LostCallLookup
from gpufn_platform.queue.pending import PendingCall, PendingStream
from gpufn_platform.web.pending_session import PendingSession

C = TypeVar("C", bound=PendingCall)

_BRACE = ord("{")
_STORE_TIMEOUT_S = 10.0  # an election takes about five seconds
_wait_check = msgspec.msgpack.Decoder(WaitCheck)
_DELETE_SYNC = f"{jetstream.API}STREAM.MSG.DELETE.{subjects.SYNC}"


class DirectPath(Protocol):
    """A direct path to a runner that bypasses the queue (`gpufn_gateway.calls.fast_path`)."""

    def offer(self, revision: Revision, message: InvocationMessage, body: bytes) -> bool:
        """Return whether the call was sent. Its end or refusal is reported to the Caller."""
        ...

    def withdraw(self, invocation: str) -> None: ...


class Caller:
    """Publishes invocations and matches replies to them. `name` must be unique among the bus's callers."""

    def __init__(self, bus: Bus, *, name: str, clock: Clock) -> None:
        self._bus = bus
        self._name = name
        self._clock = clock
        self._direct_path: DirectPath | None = None
        self._shared_folder = ""
        self._drop: Callable[[str], None] | None = None
        self._pending: dict[str, PendingCall] = {}
        self._abandoned: dict[str, float] = {}  # id → expiry, of calls abandoned before their PubAck arrived
        self._loop = asyncio.get_running_loop()
        self._lookup = LostCallLookup(bus, clock, self._pending, self.abandon)

    def start(
        self,
        direct_path: DirectPath | None = None,
        *,
        shared_folder: str = "",
        drop: Callable[[str], None] | None = None,
    ) -> None:
        """Start receiving replies.

        `shared_folder`: our folder in Home.shared_bodies, if results may be shared bodies. `drop`: removes a shared
        body that arrived for a call that had ended."""
        self._direct_path = direct_path
        self._shared_folder = shared_folder
        self._drop = drop
        self._bus.subscribe(subjects.replies(self._name), self._on_reply)
        self._bus.on_reconnect(self._on_reconnect)

    @property
    def pending(self) -> int:
        return len(self._pending)

    def invoke(self, request: CallRequest) -> PendingCall:
        """Run the call for its result. Raises BusUnavailable at once."""
        message = self._message(request, stream=False)
        call = self._call(PendingCall, request, message)
        # Fetching a large body takes time: not a short call.
        direct_path = self._direct_path if request.reference is None else None
        if direct_path is not None and direct_path.offer(request.revision, message, request.body):
            call.offered = (message, request.body)
            self._pending[call.id] = call
        else:
            self._publish(call, message, request.body)
        return call

    def open_stream(self, request: CallRequest) -> PendingStream:
        """Run the call for its items. Raises BusUnavailable at once."""
        message = self._message(request, stream=True)
        call = self._call(PendingStream, request, message)
        self._publish(call, message, request.body)
        return call

    def open_session(self, request: CallRequest) -> PendingSession:
        """Run the call for its items, and send input to it. Raises BusUnavailable at once."""
        message = self._message(request, stream=True)
        call = self._call(PendingSession, request, message)
        self._publish(call, message, request.body)
        return call

    def fail(self, function: str, revision: int | None, error: GpufnError) -> None:
        """End every pending call of a function, or of one of its revisions."""
        calls = [call for call in self._pending.values() if call.function == function]
        self._fail([call for call in calls if revision in (None, call.revision)], error)

    def fail_unless_started(self, error: GpufnError) -> None:
        """End all calls that no runner has started, and remove them from their queues."""
        self._lookup.end_unless_begun(list(self._pending.values()), error)

    def fail_all(self, error: GpufnError) -> None:
        """End all calls, and cancel the running ones."""
        self._fail(list(self._pending.values()), error)

    def _fail(self, calls: list[PendingCall], error: GpufnError) -> None:
        for call in calls:
            self.abandon(call)
            call.fail(error)

    def tick(self, now: float) -> None:
        """End calls whose deadline or queue timeout has passed. `now` is monotonic; call this a few times a second."""
        late = [call for call in self._pending.values() if now > call.expires_at + END_REPORT_WITHIN_S]
        waiting = [call for call in self._pending.values() if now > call.start_deadline]
        if self._abandoned:
            self._abandoned = {name: expires_at for name, expires_at in self._abandoned.items() if now < expires_at}
        for call in late:
            self.abandon(call)
            call.fail(InvocationExpired(f"invocation {call.id} did not end before its deadline"))
        for call in self._pending.values():
            call.tick(now)
        for call in [call for call in self._pending.values() if call.is_refused]:
            self._publish_again(call, now)
        if waiting:
            self._lookup.end_unless_begun(waiting)

    # --- reports of the fast path -------------------------------------------------------------------------------------

    def on_end(self, reply: ResultReply, body: bytes) -> None:
        call = self._pending.get(reply.invocation)
        if call is not None:
            call.take(reply, body)
        else:
            self._drop_shared_body(reply)

    def on_refused(self, invocation: str) -> None:
        """The fast path refused an offered call: queue it."""
        call = self._pending.get(invocation)
        if call is None or call.offered is None:
            return
        try:
            self._publish(call, *call.offered)
            call.offered = None
        except GpufnError as error:
            call.fail(error)

    def on_lost(self, invocation: str) -> None:
        """The runner of an offered call has disconnected. The call may have started there; queue it, without queue
        timeout."""
        call = self._pending.get(invocation)
        if call is not None and call.offered is not None:
            message, body = call.offered
            call.offered = msgspec.structs.replace(message, may_have_begun=True), body
            call.start_deadline = math.inf
            self.on_refused(invocation)

    def on_queued(self, invocation: str) -> None:
        """An offered call failed, and its next attempt is in the queue."""
        call = self._pending.get(invocation)
        if call is not None and call.offered is not None:
            call.offered = None
            call.start_deadline = math.inf

    # --- for PendingCall ----------------------------------------------------------------------------------------------

    def forget(self, invocation: str) -> None:
        self._pending.pop(invocation, None)

    def abandon(self, call: PendingCall) -> None:
        """Remove a call from the queue, now or once its PubAck reports where it is, or cancel it at its runner."""
        self.forget(call.id)
        if call.offered is not None and self._direct_path is not None:
            self._direct_path.withdraw(call.id)
            return
        with contextlib.suppress(BusUnavailable):
            if call.queue_seq:
                self._delete(call.queue_seq)
            else:
                self._abandoned[call.id] = call.expires_at
            self._bus.publish(subjects.CANCELS, encode(Cancel(call.id)))

    def give_credit(self, to: str, credit: StreamCredit) -> None:
        """Send credit to a stream's runner. Raises BusUnavailable.

        `to` comes from a message: a runner must not make a gateway publish to arbitrary subjects."""
        if subjects.is_runner_inbox(to):
            self._bus.publish(to, encode(credit))

    def send_input(self, to: str, event: CallInput, payload: bytes) -> None:
        """Send input to a call's runner. Raises BusUnavailable. `to` is checked as in `give_credit`."""
        if subjects.is_runner_inbox(to):
            self._bus.publish(to, pack(event, payload))

    # --- publishing and replies ---------------------------------------------------------------------------------------

    def _call(self, kind: type[C], request: CallRequest, message: InvocationMessage) -> C:
        call = kind(self, message, self._clock)
        if (queue_timeout_s := request.revision.spec.queue_timeout_s) is not None:
            call.start_deadline = call.since + queue_timeout_s
        return call

    def _message(self, request: CallRequest, *, stream: bool) -> InvocationMessage:
        invocation = new_invocation_id()
        return request.message(
            invocation,
            self._clock.time(),
            reply=subjects.reply(request.revision.function, self._name, invocation),
            stream=stream,
            shared_folder="" if stream else self._shared_folder,
            shared_body=request.shared_body,
        )

    def _publish(self, call: PendingCall, message: InvocationMessage, body: bytes) -> None:
        packed = pack(message, body)
        self._send(call, packed, message.reply)
        call.unstored = packed
        self._pending[call.id] = call

    def _publish_again(self, call: PendingCall, now: float) -> None:
        """Publish a call again that the server did not store, or end it after too long. `now` is monotonic."""
        if now > min(call.expires_at, call.since + _STORE_TIMEOUT_S):
            call.fail(BusUnavailable("the message bus has no queue for this call right now: call again"))
            return
        with contextlib.suppress(GpufnError):  # the next tick retries
            self._send(call, call.unstored, subjects.reply(call.function, self._name, call.id))
            call.is_refused = False

    def _send(self, call: PendingCall, packed: bytes, reply: str) -> None:
        self._bus.publish(subjects.sync_queue(call.function, call.revision, call.priority), packed, reply=reply)
        if call.priority is not Priority.NORMAL:  # runners poll the other queues
            wakeups.send_wakeup(self._bus, call.function, QueueKind(call.priority, is_sync=True), call.revision)

    def _delete(self, queue_seq: int) -> None:
        self._bus.publish(_DELETE_SYNC, b'{"seq":%d,"no_erase":true}' % queue_seq)

    def _on_reply(self, message: Message) -> None:
        name = message.subject.rpartition(".")[2]
        payload = message.payload
        call = self._pending.get(name)
        if call is None:  # it has already ended: the first end wins
            if name == subjects.WAIT_CHECK_PART:
                self._answer_wait_check(message)
            elif self._abandoned.pop(name, None) is not None and payload and payload[0] == _BRACE:
                with contextlib.suppress(GpufnError):
                    self._delete(jetstream.read_pub_ack(payload, message.subject).seq)
            elif self._shared_folder and payload and payload[0] != _BRACE:
                with contextlib.suppress(ProtocolMismatch):
                    self._drop_shared_body(unpack_reply(payload)[0])
            return
        if payload and payload[0] != _BRACE:
            try:
                reply, body = unpack_reply(payload)
            except ProtocolMismatch as error:
                call.fail(error)
                return
            call.take(reply, body)
            return
        try:
            if not payload:
                raise BusUnavailable("the message bus has no queue for this call right now")
            call.queue_seq = jetstream.read_pub_ack(payload, call.function).seq
            call.unstored = b""
        except BusUnavailable as error:
            call.is_refused = bool(call.unstored)
            if not call.is_refused:
                call.fail(error)
        except GpufnError as error:
            call.fail(error)

    def _answer_wait_check(self, message: Message) -> None:
        if message.payload and is_inbox(message.reply):  # an older runner only queries which callers exist
            query = _wait_check.decode(message.payload)
            if query.anew:
                for call in [call for name in query.invocations if (call := self._pending.get(name)) is not None]:
                    call.on_restart()
            waited_for = tuple(invocation for invocation in query.invocations if invocation in self._pending)
            self._bus.publish(message.reply, encode(WaitCheck(waited_for)))

    def _on_reconnect(self) -> None:
        self._lookup.after_reconnect()
        for call in list(self._pending.values()):
            call.on_reconnect()

    def _drop_shared_body(self, reply: Reply) -> None:
        if isinstance(reply, ResultReply) and reply.shared_body and self._drop is not None:
            self._loop.call_soon(self._drop, reply.shared_body)  # after a duplicate reply, its first may be in use
