"""Handles for invocations with a waiting caller: PendingCall for a result, PendingStream for items.

The Caller that created a handle (`caller.py`) passes incoming replies to it, and learns from it when the wait is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Protocol

from gpufn_core.errors import BusUnavailable, GpufnError, InvocationCancelled, ProtocolMismatch, WorkerLost
from gpufn_core.ids import InvocationId
from gpufn_core.protocol.messages import (
    CallInput,
    InputCredit,
    InvocationMessage,
    ItemReply,
    Reply,
    ResultReply,
    StartedReply,
    StreamCredit,
)
from gpufn_core.protocol.streams.stream_window import ReadItems
from gpufn_platform.process.clock import Clock

_SILENT_S = 2.0  # a stream without an item


class Owner(Protocol):
    """The Caller's interface for its calls."""

    def send_input(self, to: str, event: CallInput, payload: bytes) -> None: ...

    def abandon(self, call: PendingCall) -> None: ...
    def forget(self, invocation: str) -> None: ...
    def give_credit(self, to: str, credit: StreamCredit) -> None: ...


class PendingCall:
    """One invocation with a waiting caller. Await `future` for the ResultReply and the result's bytes.

    `offered`: the invocation while it is on the fast path, since it may still have to be queued. `start_deadline`:
    the call ends if no runner has started it by then. `queue_seq`: its sequence in the sync queue, 0 if unknown.
    `previous_seq`: its sequence before a reconnect, which another call may have now. `unstored`: the packed message
    from its publish until the PubAck. `is_refused`: the server did not store it, and the Caller has not published
    it again yet.
    """

    __slots__ = (
        "_caller", "_clock", "expires_at", "function", "future", "id", "is_refused", "offered", "previous_seq",
        "priority", "queue_seq", "revision", "since", "start_deadline", "unstored",
    )  # fmt: skip

    def __init__(self, caller: Owner, message: InvocationMessage, clock: Clock) -> None:
        self._caller = caller
        self._clock = clock
        self.id = InvocationId(message.id)
        self.function = message.function
        self.revision = message.revision
        self.priority = message.priority
        self.since = clock.monotonic()
        self.expires_at = self.since + (message.deadline - message.submitted_at)  # the wall clock may be set meanwhile
        self.start_deadline = math.inf
        self.queue_seq = 0
        self.previous_seq = 0
        self.unstored = b""
        self.is_refused = False
        self.offered: tuple[InvocationMessage, bytes] | None = None
        self.future: asyncio.Future[tuple[ResultReply, bytes]] = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """Stop waiting: remove the call from the queue, or cancel it at its runner."""
        self._caller.abandon(self)
        if not self.future.done():
            self.future.set_exception(InvocationCancelled(f"invocation {self.id} was cancelled"))
            self.future.exception()  # mark as retrieved: the canceling code does not read it

    def on_reconnect(self) -> None:
        """The bus is connected again."""

    def on_restart(self) -> None:
        """Its runner or worker died: it will run again from the start."""

    def tick(self, now: float) -> None:
        """Called a few times a second."""

    def take(self, reply: Reply, body: bytes) -> None:
        if isinstance(reply, StartedReply):
            self.start_deadline = math.inf
        elif not isinstance(reply, ResultReply):
            self.fail(ProtocolMismatch(f"invocation {self.id} returned a stream instead of a result"))
        elif not self.future.done():
            self.future.set_result((reply, body))
            self._caller.forget(self.id)

    def fail(self, error: GpufnError) -> None:
        self._caller.forget(self.id)
        if not self.future.done():
            self.future.set_exception(error)


class PendingStream(PendingCall):
    """An invocation whose items are read as they arrive. `future` resolves at its end, as for a call."""

    __slots__ = ("_credit_to", "_items", "_last_item_at", "_read", "_taken")

    def __init__(self, caller: Owner, message: InvocationMessage, clock: Clock) -> None:
        super().__init__(caller, message, clock)
        self._items: asyncio.Queue[tuple[ItemReply, bytes] | None] = asyncio.Queue()
        self._taken = 0
        self._read = ReadItems()
        self._last_item_at = self.since
        self._credit_to = ""

    def take(self, reply: Reply, body: bytes) -> None:
        received = self._received
        if isinstance(reply, (StartedReply, InputCredit)):
            super().take(reply, body)
        elif isinstance(reply, ResultReply):
            if reply.items == received:
                super().take(reply, body)
                self._items.put_nowait(None)
            else:
                lost = f"stream {self.id} is incomplete: the message bus delivered {received} of {reply.items} items"
                self.fail(BusUnavailable(lost))
        elif reply.number == received:
            self._credit_to = reply.credit_to
            self._last_item_at = self._clock.monotonic()
            self._items.put_nowait((reply, body))
        elif reply.number == 0:
            self.on_restart()
        else:
            self._caller.abandon(self)
            lost = f"the message bus lost the items before number {reply.number}"
            self.fail(BusUnavailable(f"stream {self.id} was interrupted after {received} items: {lost}"))

    def fail(self, error: GpufnError) -> None:
        super().fail(error)
        self._items.put_nowait(None)

    def cancel(self) -> None:
        super().cancel()
        self._items.put_nowait(None)

    async def items(self) -> AsyncIterator[tuple[ItemReply, bytes]]:
        """Yield each item in order until the end; then `future` has the ResultReply or the error.

        Reading grants the generator credit for more items; a reader that stops makes it wait.
        """
        while (item := await self._items.get()) is not None:
            self._taken += 1
            if self._read.add(len(item[1])):
                self._give_credit()
            yield item

    def on_reconnect(self) -> None:
        self._give_credit()

    def on_restart(self) -> None:
        """Fail if items were already received: the reader cannot use a second run."""
        if self._received:
            self._caller.abandon(self)
            self.fail(WorkerLost(f"stream {self.id} was interrupted after {self._received} items: its worker died"))

    @property
    def _received(self) -> int:
        """Number of items received."""
        return self._taken + self._items.qsize()

    def tick(self, now: float) -> None:
        """Send the credit again after a silence: it may have been lost, and the generator would wait forever."""
        if now - self._last_item_at >= _SILENT_S:
            self._last_item_at = now
            self._give_credit()

    def _give_credit(self) -> None:
        if self._credit_to:
            with contextlib.suppress(BusUnavailable):  # `tick` retries
                self._caller.give_credit(self._credit_to, StreamCredit(self.id, self._taken))
                self._read.clear()
