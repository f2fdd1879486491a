"""What somebody holds of an invocation that he waits for: its PendingCall or, for its items, its PendingStream.

The Caller that made it (calls.py) tells it what arrives, and is told when nobody waits any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Protocol

from gpufn_core.errors import BusUnavailable, GpufnError, InvocationCancelled, ProtocolMismatch, WorkerLost
from gpufn_core.ids import InvocationId
from gpufn_core.protocol.frames import STREAM_WINDOW
from gpufn_core.protocol.messages import BegunReply, InvocationMessage, ItemReply, Reply, ResultReply, StreamCredit
from gpufn_platform.process.clock import Clock

_SILENT_S = 2.0  # a stream without an item


class Maker(Protocol):
    """What a call needs of its Caller."""

    def abandon(self, call: PendingCall) -> None: ...
    def forget(self, invocation: str) -> None: ...
    def give_credit(self, to: str, credit: StreamCredit) -> None: ...


class PendingCall:
    """One invocation that somebody waits for. Await `future`: the ResultReply and the result's bytes.

    `offered` holds the invocation while it is on the lane, for it may come to be queued. When nobody has begun with it
    at `starts_by`, it ends. `queue_seq` is its place in the sync queue, 0 while that is not known; `was_at` is where it
    was before a reconnect, when another call may have that place. `unstored` is the packed message from its publish
    until the PubAck. `is_refused`: the server did not store it, and the Caller has not published it again yet.
    """

    __slots__ = (
        "_caller", "_clock", "expires_at", "function", "future", "id", "is_refused", "offered", "priority", "queue_seq",
        "revision", "since", "starts_by", "unstored", "was_at",
    )  # fmt: skip

    def __init__(
        self,
        caller: Maker,
        message: InvocationMessage,
        future: asyncio.Future[tuple[ResultReply, bytes]],
        clock: Clock,
    ) -> None:
        self._caller = caller
        self._clock = clock
        self.id = InvocationId(message.id)
        self.function = message.function
        self.revision = message.revision
        self.priority = message.priority
        self.since = clock.monotonic()
        self.expires_at = self.since + (message.deadline - message.submitted_at)  # the wall clock may be set meanwhile
        self.starts_by = math.inf
        self.queue_seq = 0
        self.was_at = 0
        self.unstored = b""
        self.is_refused = False
        self.offered: tuple[InvocationMessage, bytes] | None = None
        self.future = future

    def cancel(self) -> None:
        """Nobody waits any more: take it out of the queue, or have its runner end it."""
        self._caller.abandon(self)
        if not self.future.done():
            self.future.set_exception(InvocationCancelled(f"invocation {self.id} was cancelled"))
            self.future.exception()  # whoever cancelled does not come back for it

    def on_reconnect(self) -> None:
        """The bus is back."""

    def begins_anew(self) -> None:
        """Who ran it died: it would run once more, from the start."""

    def tick(self, now: float) -> None:
        """A few times a second."""

    def take(self, reply: Reply, body: bytes) -> None:
        if isinstance(reply, BegunReply):
            self.starts_by = math.inf
        elif isinstance(reply, ItemReply):
            self.fail(ProtocolMismatch(f"invocation {self.id} answered with a stream where a result was asked for"))
        elif not self.future.done():
            self.future.set_result((reply, body))
            self._caller.forget(self.id)

    def fail(self, error: GpufnError) -> None:
        self._caller.forget(self.id)
        if not self.future.done():
            self.future.set_exception(error)


class PendingStream(PendingCall):
    """An invocation whose items are read as they come. `future` resolves at its end, as for a call."""

    __slots__ = ("_credit_to", "_heard_at", "_items", "_taken", "_told")

    def __init__(
        self,
        caller: Maker,
        message: InvocationMessage,
        future: asyncio.Future[tuple[ResultReply, bytes]],
        clock: Clock,
    ) -> None:
        super().__init__(caller, message, future, clock)
        self._items: asyncio.Queue[tuple[ItemReply, bytes] | None] = asyncio.Queue()
        self._taken = 0
        self._told = 0  # of those taken
        self._heard_at = self.since
        self._credit_to = ""

    def take(self, reply: Reply, body: bytes) -> None:
        if isinstance(reply, ResultReply):
            expected = self._heard
            if reply.items != expected:
                lost = f"stream {self.id} broke off: of its {reply.items} items the message bus lost all but {expected}"
                self.fail(BusUnavailable(lost))
                return
            super().take(reply, body)
            self._items.put_nowait(None)
            return
        if isinstance(reply, BegunReply):
            super().take(reply, body)
            return
        if reply.number == 0 and self._heard:
            self.begins_anew()
            return
        if reply.number != (expected := self._heard):
            self._caller.abandon(self)
            lost = f"the message bus lost those before number {reply.number}"
            self.fail(BusUnavailable(f"stream {self.id} broke off after {expected} items: {lost}"))
            return
        self._credit_to = reply.credit_to
        self._heard_at = self._clock.monotonic()
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

    def begins_anew(self) -> None:
        """Nobody can use it, when some of its items were heard."""
        if self._heard:
            self._caller.abandon(self)
            self.fail(WorkerLost(f"stream {self.id} broke off after {self._heard} items: who ran it died"))

    @property
    def _heard(self) -> int:
        """Items."""
        return self._taken + self._items.qsize()

    def tick(self, now: float) -> None:
        """Credit may have been lost, here or where the items are made, which would wait for it for ever."""
        if now - self._heard_at >= _SILENT_S:
            self._heard_at = now
            self._give_credit()

    def _give_credit(self) -> None:
        if self._credit_to:
            with contextlib.suppress(BusUnavailable):  # `tick` comes back here
                self._caller.give_credit(self._credit_to, StreamCredit(self.id, self._taken))
                self._told = self._taken
