"""Invocations that somebody waits for: publish one, await its reply. The gateway and the runner each own a Caller.

1. `invoke` offers the call to the lane, if there is one and it has room. Else, and when the lane refuses it, it is
   published to the function's sync queue.
2. The stream's PubAck and the reply come to one subject, which ends in the invocation's id; a PubAck is JSON and starts
   with a brace, which no reply can. A PubAck that refuses ends the call at once (QueueFull); one that accepts tells
   where the message is stored. A runner that queues the next attempt says so in the same words.
3. The runner's ResultReply ends the call, whatever the outcome: a caller reads its kind.
4. `tick` ends calls whose deadline has passed, and those that have waited for as long as they may (`searches`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Protocol, TypeVar

from gpufn.bus import doorbells, jetstream
from gpufn.bus.connection import Bus, Message
from gpufn.bus.searches import Searches
from gpufn.clock import Clock
from gpufn.errors import (
    BusUnavailable,
    GpufnError,
    InvocationCancelled,
    InvocationExpired,
    ProtocolMismatch,
    WorkerLost,
)
from gpufn.ids import InvocationId, new_invocation_id
from gpufn.invocation import WORD_WITHIN_S
from gpufn.priority import Priority
from gpufn.protocol import subjects
from gpufn.protocol.codec import encode, pack
from gpufn.protocol.frames import STREAM_WINDOW
from gpufn.protocol.messages import (
    Cancel,
    InvocationMessage,
    ItemReply,
    Reply,
    ResultReply,
    StreamCredit,
    unpack_reply,
)
from gpufn.revision import Revision

C = TypeVar("C", bound="PendingCall")

_SILENT_S = 2.0  # a stream without an item
_BRACE = ord("{")
_DELETE_SYNC = f"{jetstream.API}STREAM.MSG.DELETE.{subjects.SYNC}"


class CallRequest(NamedTuple):
    """What a caller asks for. `deadline` is in unix seconds; `parent` the invocation that asks; `trace` a traceparent.

    `parcel` names the body in the caller's folder (`gpufn.parcels`), when `body` is not it. `owner` is the id of the
    API key that asks.
    """

    revision: Revision
    method: str
    content_type: str
    body: bytes
    accept: str
    deadline: float
    parent: str = ""
    trace: str = ""
    parcel: str = ""
    priority: Priority = Priority.NORMAL
    owner: str = subjects.PLATFORM


class Lane(Protocol):
    """A way to a runner past the queue (`gpufn_gateway.lane`)."""

    def offer(self, revision: Revision, message: InvocationMessage, body: bytes) -> bool:
        """Whether the call is on its way; its end or its refusal is told to the Caller."""
        ...

    def withdraw(self, invocation: str) -> None: ...


class PendingCall:
    """One invocation that somebody waits for. Await `future`: the ResultReply and the result's bytes.

    `offered` holds the invocation while it is on the lane, for it may come to be queued. When nobody has begun with it
    at `starts_by`, it ends. `queue_seq` is its place in the sync queue, 0 while that is not known; `was_at` is where it
    was before a reconnect, when another call may have that place.
    """

    __slots__ = (
        "_caller", "expires_at", "function", "future", "id", "offered", "priority", "queue_seq", "revision", "since",
        "starts_by", "was_at",
    )  # fmt: skip

    def __init__(self, caller: Caller, message: InvocationMessage, future: asyncio.Future[tuple[ResultReply, bytes]]):
        self._caller = caller
        self.id = InvocationId(message.id)
        self.function = message.function
        self.revision = message.revision
        self.priority = message.priority
        self.since = caller._clock.monotonic()
        self.expires_at = self.since + (message.deadline - message.submitted_at)  # the wall clock may be set meanwhile
        self.starts_by = math.inf
        self.queue_seq = 0
        self.was_at = 0
        self.offered: tuple[InvocationMessage, bytes] | None = None
        self.future = future

    def cancel(self) -> None:
        """Nobody waits any more: take it out of the queue, or have its runner end it."""
        self._caller._abandon(self)
        if not self.future.done():
            self.future.set_exception(InvocationCancelled(f"invocation {self.id} was cancelled"))
            self.future.exception()  # whoever cancelled does not come back for it

    def on_reconnect(self) -> None:
        """The bus is back."""

    def tick(self, now: float) -> None:
        """A few times a second."""

    def take(self, reply: Reply, body: bytes) -> None:
        if isinstance(reply, ItemReply):
            self.fail(ProtocolMismatch(f"invocation {self.id} answered with a stream where a result was asked for"))
        elif not self.future.done():
            self.future.set_result((reply, body))
            self._caller._forget(self.id)

    def fail(self, error: GpufnError) -> None:
        self._caller._forget(self.id)
        if not self.future.done():
            self.future.set_exception(error)


class PendingStream(PendingCall):
    """An invocation whose items are read as they come. `future` resolves at its end, as for a call."""

    __slots__ = ("_credit_to", "_heard_at", "_items", "_taken", "_told")

    def __init__(self, caller: Caller, message: InvocationMessage, future: asyncio.Future[tuple[ResultReply, bytes]]):
        super().__init__(caller, message, future)
        self._items: asyncio.Queue[tuple[ItemReply, bytes] | None] = asyncio.Queue()
        self._taken = 0
        self._told = 0  # of those taken
        self._heard_at = self.since
        self._credit_to = ""

    def take(self, reply: Reply, body: bytes) -> None:
        if isinstance(reply, ResultReply):
            expected = self._taken + self._items.qsize()
            if reply.items != expected:
                lost = f"stream {self.id} broke off: of its {reply.items} items the message bus lost all but {expected}"
                self.fail(BusUnavailable(lost))
                return
            super().take(reply, body)
            self._items.put_nowait(None)
            return
        if reply.number != (expected := self._taken + self._items.qsize()):
            self._caller._abandon(self)
            broke_off = f"stream {self.id} broke off after {expected} items:"
            if reply.number == 0:
                self.fail(WorkerLost(f"{broke_off} who ran it died, and it began again from the start"))
            else:
                self.fail(BusUnavailable(f"{broke_off} the message bus lost those before number {reply.number}"))
            return
        self._credit_to = reply.credit_to
        self._heard_at = self._caller._clock.monotonic()
        self._items.put_nowait((reply, body))

    def fail(self, error: GpufnError) -> None:
        super().fail(error)
        self._items.put_nowait(None)

    def cancel(self) -> None:
        super().cancel()
        self._items.put_nowait(None)

    async def items(self) -> AsyncIterator[tuple[ItemReply, bytes]]:
        """Each item, in order, then the end; then `future` holds the ResultReply or the error.

        Reading gives the generator credit for more; a reader that stops leaves it waiting.
        """
        while (item := await self._items.get()) is not None:
            self._taken += 1
            if self._taken - self._told >= STREAM_WINDOW // 2:
                self._give_credit()
            yield item

    def on_reconnect(self) -> None:
        self._give_credit()

    def tick(self, now: float) -> None:
        """Credit may have been lost, here or where the items are made, which would wait for it for ever."""
        if now - self._heard_at >= _SILENT_S:
            self._heard_at = now
            self._give_credit()

    def _give_credit(self) -> None:
        if self._credit_to:
            with contextlib.suppress(BusUnavailable):  # `tick` comes back here
                self._caller._bus.publish(self._credit_to, encode(StreamCredit(self.id, self._taken)))
                self._told = self._taken


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
        self._searches = Searches(bus, clock, self._pending, self._abandon)

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
        if self._lane is not None and self._lane.offer(request.revision, message, request.body):
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
                self._abandon(call)
                call.fail(error)

    def tick(self, now: float) -> None:
        """End the calls whose deadline is over, or that have waited for too long. `now` is monotonic; call it a few
        times a second."""
        late = [call for call in self._pending.values() if now > call.expires_at + WORD_WITHIN_S]
        waiting = [call for call in self._pending.values() if now > call.starts_by]
        if self._abandoned:
            self._abandoned = {token: until for token, until in self._abandoned.items() if now < until}
        for call in late:
            self._abandon(call)
            call.fail(InvocationExpired(f"invocation {call.id} did not end before its deadline"))
        for call in self._pending.values():
            call.tick(now)
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

    def on_queued(self, invocation: str) -> None:
        """An offered call failed, and its next attempt is in the queue."""
        call = self._pending.get(invocation)
        if call is not None and call.offered is not None:
            call.offered = None
            call.starts_by = math.inf

    # --- what the calls and the bus do to us --------------------------------------------------------------------------

    def _call(self, kind: type[C], request: CallRequest, message: InvocationMessage) -> C:
        call = kind(self, message, self._loop.create_future())
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
            priority=request.priority,
            owner=request.owner,
        )

    def _publish(self, call: PendingCall, message: InvocationMessage, body: bytes) -> None:
        queue = subjects.sync_queue(message.function, message.revision, message.priority)
        self._bus.publish(queue, pack(message, body), reply=message.reply)
        self._pending[call.id] = call
        if message.priority is not Priority.NORMAL:  # those are polled
            doorbells.ring(self._bus, message.function, message.queue)

    def _forget(self, invocation: str) -> None:
        self._pending.pop(invocation, None)

    def _abandon(self, call: PendingCall) -> None:
        """Take it out of the queue, at once or as soon as its PubAck tells where it is; or have its runner end it."""
        self._forget(call.id)
        if call.offered is not None and self._lane is not None:
            self._lane.withdraw(call.id)
            return
        with contextlib.suppress(BusUnavailable):
            if call.queue_seq:
                self._delete(call.queue_seq)
            else:
                self._abandoned[call.id] = call.expires_at
            self._bus.publish(subjects.CANCELS, encode(Cancel(call.id)))

    def _delete(self, queue_seq: int) -> None:
        self._bus.publish(_DELETE_SYNC, b'{"seq":%d,"no_erase":true}' % queue_seq)

    def _on_reply(self, message: Message) -> None:
        token = message.subject.rpartition(".")[2]
        payload = message.payload
        call = self._pending.get(token)
        if call is None:  # it ended before: the first end wins
            if self._abandoned.pop(token, None) is not None and payload and payload[0] == _BRACE:
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
        except GpufnError as error:
            call.fail(error)

    def _on_reconnect(self) -> None:
        self._searches.after_reconnect()
        for call in list(self._pending.values()):
            call.on_reconnect()

    def _drop_parcel(self, reply: Reply) -> None:
        if isinstance(reply, ResultReply) and reply.parcel and self._drop is not None:
            self._drop(reply.parcel)
