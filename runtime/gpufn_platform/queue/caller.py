"""Invocations that somebody waits for: publish one, await its reply. The gateway and the runner each own a Caller.

1. `invoke` offers the call to the lane, if there is one and it has room. Else, and when the lane refuses it, it is
   published to the function's sync queue.
2. The stream's PubAck and the reply come to one subject, which ends in the invocation's id; a PubAck is JSON and starts
   with a brace, which no reply can. A PubAck that refuses ends the call at once (QueueFull); one that accepts tells
   where the message is stored. A runner that queues the next attempt says so in the same words.
   While the stream has no leader (an election, a restart), the server reports that it stored nothing. `tick` then
   publishes the message again, for `_STORED_WITHIN_S` at most.
3. The runner's ResultReply ends the call, whatever the outcome: a caller reads its kind.
4. Runners ask now and then whether the calls that they run are waited for still: what was said of one that was
   abandoned, a connection that broke may have taken along.
5. `tick` ends calls whose deadline has passed, and those that have waited for as long as they may (`searches`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from gpufn_core.domain.invocation import WORD_WITHIN_S
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import BusUnavailable, GpufnError, InvocationExpired, ProtocolMismatch
from gpufn_core.ids import new_invocation_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode, pack
from gpufn_core.protocol.messages import (
    Cancel,
    InvocationMessage,
    Reply,
    ResultReply,
    StreamCredit,
    WaitedFor,
    unpack_reply,
)
from gpufn_core.spec.priority import Priority, QueueKind
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus, Message, is_inbox
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import wakeups
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.lost_call_lookup import Searches
from gpufn_platform.queue.pending import PendingCall, PendingStream

C = TypeVar("C", bound=PendingCall)

_BRACE = ord("{")
_STORED_WITHIN_S = 10.0  # an election takes about five seconds
_waited_for = msgspec.msgpack.Decoder(WaitedFor)
_DELETE_SYNC = f"{jetstream.API}STREAM.MSG.DELETE.{subjects.SYNC}"


class Lane(Protocol):
    """A way to a runner past the queue (`gpufn_gateway.calls.fast_path`)."""

    def offer(self, revision: Revision, message: InvocationMessage, body: bytes) -> bool:
        """Whether the call is on its way; its end or its refusal is told to the Caller."""
        ...

    def withdraw(self, invocation: str) -> None: ...


class Caller:
    """Publishes invocations and matches replies to them. `name` is unique among the bus's callers."""

    def __init__(self, bus: Bus, *, name: str, clock: Clock) -> None:
        self._bus = bus
        self._name = name
        self._clock = clock
        self._lane: Lane | None = None
        self._parcels = ""
        self._drop: Callable[[str], None] | None = None
        self._pending: dict[str, PendingCall] = {}
        self._abandoned: dict[str, float] = {}  # id → when it expires, of calls given up before their PubAck came
        self._loop = asyncio.get_running_loop()
        self._searches = Searches(bus, clock, self._pending, self.abandon)

    def start(self, lane: Lane | None = None, *, parcels: str = "", drop: Callable[[str], None] | None = None) -> None:
        """`parcels` is our folder in Home.parcels, if results may come as parcels; `drop` removes one that came for a
        call that had ended."""
        self._lane = lane
        self._parcels = parcels
        self._drop = drop
        self._bus.subscribe(subjects.replies(self._name), self._on_reply)
        self._bus.on_reconnect(self._on_reconnect)

    @property
    def pending(self) -> int:
        return len(self._pending)

    def invoke(self, request: CallRequest) -> PendingCall:
        """Have it run, for its result. Raises BusUnavailable at once."""
        message = self._message(request, stream=False)
        call = self._call(PendingCall, request, message)
        lane = self._lane if request.reference is None else None  # a call whose body is fetched is not short
        if lane is not None and lane.offer(request.revision, message, request.body):
            call.offered = (message, request.body)
            self._pending[call.id] = call
        else:
            self._publish(call, message, request.body)
        return call

    def open_stream(self, request: CallRequest) -> PendingStream:
        """Have it run, for its items. Raises BusUnavailable at once."""
        message = self._message(request, stream=True)
        call = self._call(PendingStream, request, message)
        self._publish(call, message, request.body)
        return call

    def fail(self, function: str, revision: int | None, error: GpufnError) -> None:
        """End every pending call of a function, or of one of its revisions."""
        for call in list(self._pending.values()):
            if call.function == function and revision in (None, call.revision):
                self.abandon(call)
                call.fail(error)

    def fail_unless_begun(self, error: GpufnError) -> None:
        """End the calls that no runner has begun: they are taken out of their queues."""
        self._searches.end_unless_begun(list(self._pending.values()), error)

    def fail_all(self, error: GpufnError) -> None:
        """End every call, and what runs for it."""
        for call in list(self._pending.values()):
            self.abandon(call)
            call.fail(error)

    def tick(self, now: float) -> None:
        """End the calls whose deadline is over, or that have waited for too long. `now` is monotonic; call it a few
        times a second."""
        late = [call for call in self._pending.values() if now > call.expires_at + WORD_WITHIN_S]
        waiting = [call for call in self._pending.values() if now > call.starts_by]
        if self._abandoned:
            self._abandoned = {token: until for token, until in self._abandoned.items() if now < until}
        for call in late:
            self.abandon(call)
            call.fail(InvocationExpired(f"invocation {call.id} did not end before its deadline"))
        for call in self._pending.values():
            call.tick(now)
        for call in [each for each in self._pending.values() if each.is_refused]:
            self._publish_again(call, now)
        if waiting:
            self._searches.end_unless_begun(waiting)

    # --- what the lane tells ------------------------------------------------------------------------------------------

    def on_end(self, reply: ResultReply, body: bytes) -> None:
        call = self._pending.get(reply.invocation)
        if call is not None:
            call.take(reply, body)
        else:
            self._drop_parcel(reply)

    def on_refused(self, invocation: str) -> None:
        """An offered call has to be queued after all."""
        call = self._pending.get(invocation)
        if call is None or call.offered is None:
            return
        try:
            self._publish(call, *call.offered)
            call.offered = None
        except GpufnError as error:
            call.fail(error)

    def on_lost(self, invocation: str) -> None:
        """Who had this offered call is gone. It may have begun there: so it has to be queued, and has not waited."""
        call = self._pending.get(invocation)
        if call is not None and call.offered is not None:
            message, body = call.offered
            call.offered = msgspec.structs.replace(message, may_have_begun=True), body
            call.starts_by = math.inf
            self.on_refused(invocation)

    def on_queued(self, invocation: str) -> None:
        """An offered call failed, and its next attempt is in the queue."""
        call = self._pending.get(invocation)
        if call is not None and call.offered is not None:
            call.offered = None
            call.starts_by = math.inf

    # --- what a call tells --------------------------------------------------------------------------------------------

    def forget(self, invocation: str) -> None:
        self._pending.pop(invocation, None)

    def abandon(self, call: PendingCall) -> None:
        """Take it out of the queue, at once or as soon as its PubAck tells where it is; or have its runner end it."""
        self.forget(call.id)
        if call.offered is not None and self._lane is not None:
            self._lane.withdraw(call.id)
            return
        with contextlib.suppress(BusUnavailable):
            if call.queue_seq:
                self._delete(call.queue_seq)
            else:
                self._abandoned[call.id] = call.expires_at
            self._bus.publish(subjects.CANCELS, encode(Cancel(call.id)))

    def give_credit(self, to: str, credit: StreamCredit) -> None:
        """Raises BusUnavailable. `to` is from a message: a runner must not make a gateway publish elsewhere."""
        if subjects.is_runner_inbox(to):
            self._bus.publish(to, encode(credit))

    # --- to the bus and back -----------------------------------------------------------------------------------------

    def _call(self, kind: type[C], request: CallRequest, message: InvocationMessage) -> C:
        call = kind(self, message, self._loop.create_future(), self._clock)
        if (queue_timeout_s := request.revision.spec.queue_timeout_s) is not None:
            call.starts_by = call.since + queue_timeout_s
        return call

    def _message(self, request: CallRequest, *, stream: bool) -> InvocationMessage:
        invocation = new_invocation_id()
        function = request.revision.function
        return InvocationMessage(
            id=invocation,
            function=function,
            revision=request.revision.number,
            method=request.method,
            content_type=request.content_type,
            accept=request.accept,
            reply=subjects.reply(function, self._name, invocation),
            submitted_at=self._clock.time(),
            deadline=request.deadline,
            stream=stream,
            parent=request.parent,
            trace=request.trace,
            parcels="" if stream else self._parcels,
            parcel=request.parcel,
            priority=request.queued_as,
            owner=request.owner,
            reference=request.reference,
        )

    def _publish(self, call: PendingCall, message: InvocationMessage, body: bytes) -> None:
        packed = pack(message, body)
        self._send(call, packed, message.reply)
        call.unstored = packed
        self._pending[call.id] = call

    def _publish_again(self, call: PendingCall, now: float) -> None:
        """Publish a call that the server did not store, or end it when it has waited too long. `now` is monotonic."""
        if now > min(call.expires_at, call.since + _STORED_WITHIN_S):
            call.fail(BusUnavailable("the message bus has no queue for this call right now: call again"))
            return
        with contextlib.suppress(GpufnError):  # the next tick comes back here
            self._send(call, call.unstored, subjects.reply(call.function, self._name, call.id))
            call.is_refused = False

    def _send(self, call: PendingCall, packed: bytes, reply: str) -> None:
        self._bus.publish(subjects.sync_queue(call.function, call.revision, call.priority), packed, reply=reply)
        if call.priority is not Priority.NORMAL:  # those are polled
            wakeups.ring(self._bus, call.function, QueueKind(call.priority, is_sync=True))

    def _delete(self, queue_seq: int) -> None:
        self._bus.publish(_DELETE_SYNC, b'{"seq":%d,"no_erase":true}' % queue_seq)

    def _on_reply(self, message: Message) -> None:
        token = message.subject.rpartition(".")[2]
        payload = message.payload
        call = self._pending.get(token)
        if call is None:  # it ended before: the first end wins
            if token == subjects.ASKED:
                self._tell_waited_for(message)
            elif self._abandoned.pop(token, None) is not None and payload and payload[0] == _BRACE:
                with contextlib.suppress(GpufnError):
                    self._delete(jetstream.read_pub_ack(payload, message.subject).seq)
            elif self._parcels and payload and payload[0] != _BRACE:
                with contextlib.suppress(ProtocolMismatch):
                    self._drop_parcel(unpack_reply(payload)[0])
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

    def _tell_waited_for(self, message: Message) -> None:
        if message.payload and is_inbox(message.reply):  # an older runner only asks who is here
            asked = _waited_for.decode(message.payload)
            if asked.anew:
                for call in [self._pending[each] for each in asked.invocations if each in self._pending]:
                    call.begins_anew()
            waited_for = tuple(each for each in asked.invocations if each in self._pending)
            self._bus.publish(message.reply, encode(WaitedFor(waited_for)))

    def _on_reconnect(self) -> None:
        self._searches.after_reconnect()
        for call in list(self._pending.values()):
            call.on_reconnect()

    def _drop_parcel(self, reply: Reply) -> None:
        if isinstance(reply, ResultReply) and reply.parcel and self._drop is not None:
            self._loop.call_soon(self._drop, reply.parcel)  # told twice, it may be about to be taken
