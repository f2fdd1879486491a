"""Unacknowledged replies, kept for resending until the caller has probably received them.

1. Until NATS has confirmed a reply, it is sent again after each reconnect: a server that hangs, dies or is cut off
   loses the data that was written last.
2. For a while longer, it is sent again to a caller that looks for its call: the caller's connection may have hung and
   lost the reply.

The call has ended and does not run again. A caller drops duplicates. The number of replies is bounded; the oldest are
dropped first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from typing import Final, NamedTuple

from gpufn_core.errors import BusUnavailable, PayloadTooLarge
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.tasks import Tasks

log = logging.getLogger(__name__)

_MAX_REPLIES: Final = 10_000
_MAX_BYTES: Final = 64 << 20
_MAX_CONFIRMED_BYTES: Final = 16 << 20
_KEEP_S: Final = 30.0  # a caller detects a lost bus connection within 15 s, and looks for its calls after reconnecting


class _Reply(NamedTuple):
    number: int
    at: float  # monotonic
    subject: str
    payload: bytes


class UnacknowledgedReplies:
    """Sends and keeps replies. The owner calls `tick` each second."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._replies: OrderedDict[str, _Reply] = OrderedDict()  # by invocation id, the last token of the subject
        self._bytes = 0
        self._count = 0
        self._confirmed_number = 0  # NATS has received replies up to this number
        self._has_unsent = False  # some unconfirmed replies have not been sent
        self._confirming = Tasks("replies")
        bus.on_reconnect(self._resend)

    def send(self, subject: str, payload: bytes) -> None:
        """Send a reply now, or when the bus is back. Raises PayloadTooLarge."""
        try:
            self._bus.publish(subject, payload)
        except BusUnavailable:  # or NATS has stopped reading, while the connection stands
            self._has_unsent = True
        self._count += 1
        invocation = subject.rpartition(".")[2]
        self._forget(invocation)
        self._replies[invocation] = _Reply(self._count, self._loop.time(), subject, payload)
        self._bytes += len(payload)
        while len(self._replies) > _MAX_REPLIES or self._bytes > _MAX_BYTES:
            self._forget(next(iter(self._replies)))

    def repeat(self, invocation: str) -> None:
        """Send the call's reply again if it has ended here: its caller looks for it."""
        if (reply := self._replies.get(invocation)) is not None:
            self._publish(reply)

    def tick(self) -> None:
        if self._has_unsent:
            self._resend()
        elif self._confirmed_number < self._count and self._bus.connected and not self._confirming:
            self._confirming.start(self.confirm())
        expiry = self._loop.time() - _KEEP_S
        while self._replies and (oldest := next(iter(self._replies.values()))).number <= self._confirmed_number:
            if oldest.at >= expiry and self._bytes <= _MAX_CONFIRMED_BYTES:
                break
            self._forget(next(iter(self._replies)))

    async def confirm(self) -> None:
        """Flush, and record which replies NATS has received."""
        last_sent = self._count
        with contextlib.suppress(BusUnavailable):
            await self._bus.flush()
            self._confirmed_number = last_sent

    def _forget(self, invocation: str) -> None:
        if (reply := self._replies.pop(invocation, None)) is not None:
            self._bytes -= len(reply.payload)

    def _resend(self) -> None:
        self._has_unsent = False
        for reply in self._replies.values():
            if reply.number > self._confirmed_number and not self._publish(reply):
                self._has_unsent = True
                return

    def _publish(self, reply: _Reply) -> bool:
        """Return False if the bus is away."""
        try:
            self._bus.publish(reply.subject, reply.payload)
        except PayloadTooLarge:
            log.warning("dropped a reply of %d bytes, which is too large for the bus", len(reply.payload))
        except BusUnavailable:
            return False
        return True
