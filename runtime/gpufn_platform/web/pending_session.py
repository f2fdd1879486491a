"""A web session as its gateway sees it: a stream of items from the worker, and input to it.

A session is never repeated: its client has sent a request that may have had an effect, and may have received a part of
the response. Once it has begun, it ends with the worker, the runner or a message that the bus lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gpufn_core.errors import BusUnavailable, GpufnError, WorkerLost
from gpufn_core.protocol.messages import CallInput, InputCredit, InvocationMessage, Reply
from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.web_session import DOWN_WINDOW_BYTES, UP_WINDOW_BYTES
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue.pending import Owner, PendingStream

_LOST_AFTER_S = 2 * web_session.CREDIT_REPEATED_S  # a waiting worker has received all that was sent before that


class PendingSession(PendingStream):
    __slots__ = ("_changed", "_is_over", "_number", "_send_to", "_sent", "_sent_at", "_taken_input")

    def __init__(self, caller: Owner, message: InvocationMessage, clock: Clock) -> None:
        super().__init__(caller, message, clock)
        self._send_to = ""  # the inbox of its runner, once it has begun
        self._number = 0
        self._sent = self._taken_input = 0  # bytes of input
        self._sent_at = 0.0
        self._is_over = False
        self._changed = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        """True if the application may have been called."""
        return bool(self._send_to) or self._received > 0

    async def send(self, payload: bytes) -> None:
        """Send an event as soon as there is room for it. Does nothing after the end. Raises BusUnavailable."""
        while not self._is_over and not (self._send_to and self._sent - self._taken_input < UP_WINDOW_BYTES):
            self._changed.clear()
            await self._changed.wait()
        self.send_now(payload)

    def send_now(self, payload: bytes) -> None:
        """Send an event, whether there is room for it or not, to a session that has begun. Raises as `send`."""
        if self._is_over:
            return
        self._caller.send_input(self._send_to, CallInput(self.id, self._number), payload)
        self._number += 1
        self._sent += web_session.size_of(payload)
        self._sent_at = self._clock.monotonic()

    async def payloads(self) -> AsyncIterator[bytes]:
        """Yield the worker's events in order until the end; then `future` has the ResultReply or the error."""
        while (item := await self._items.get()) is not None:
            self._taken += 1
            is_due = self._read.add(len(item[1]))
            yield item[1]
            if is_due or self._read.bytes >= DOWN_WINDOW_BYTES // 4:
                self._give_credit()

    def take(self, reply: Reply, body: bytes) -> None:
        if not isinstance(reply, InputCredit):
            super().take(reply, body)
            if self.future.done():
                self._end()
            return
        if not self._send_to:
            self._send_to = reply.send_to
        elif reply.send_to != self._send_to or reply.taken < self._taken_input:
            self.on_restart()
            return
        self._taken_input = reply.taken
        if reply.waits and self._sent > reply.taken and self._clock.monotonic() - self._sent_at > _LOST_AFTER_S:
            self.interrupt(
                BusUnavailable(f"session {self.id} was interrupted: the message bus lost a part of its input")
            )
        self._changed.set()

    def fail(self, error: GpufnError) -> None:
        super().fail(error)
        self._end()

    def cancel(self) -> None:
        super().cancel()
        self._end()

    def on_restart(self) -> None:
        if self.has_begun:
            self.interrupt(WorkerLost(f"session {self.id} was interrupted: its worker died"))

    def interrupt(self, error: GpufnError) -> None:
        """End the session at both ends."""
        self._caller.abandon(self)
        self.fail(error)

    def _end(self) -> None:
        self._is_over = True
        self._changed.set()
