"""Replies to who waits, kept until he has them for all we know.

1. until the bus has one for certain, it is sent again after each reconnect: a server that hangs, or dies, or is cut
   off, takes what was last written to it along
2. for a while longer, it is sent again to who looks for its call: his own connection may have hung, and taken it along

What a reply was for has ended, and does not run again. Who hears one twice drops the second. Bounded: the oldest go
first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from typing import Final, NamedTuple

from gpufn_core.errors import BusUnavailable, PayloadTooLarge
from gpufn_platform.bus.connection import Bus

log = logging.getLogger(__name__)

_MOST: Final = 10_000
_MOST_BYTES: Final = 64 << 20
_MOST_SURE_BYTES: Final = 16 << 20
_KEPT_S: Final = 30.0  # who lost the bus notices within 15 s, and looks for his calls when he has it again


class _Reply(NamedTuple):
    number: int
    at: float  # monotonic
    subject: str
    payload: bytes


class Replies:
    """The owner calls `tick` each second."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._loop = asyncio.get_running_loop()
        self._kept: OrderedDict[str, _Reply] = OrderedDict()  # by what ends its subject: the invocation's id
        self._bytes = 0
        self._count = 0
        self._sure_to = 0  # the bus has those up to this number
        self._is_behind = False  # not all of the others have been sent
        self._confirming: asyncio.Task[None] | None = None
        bus.on_reconnect(self._send_again)

    def send(self, subject: str, payload: bytes) -> None:
        """Now, or when the bus is back. Raises PayloadTooLarge."""
        try:
            self._bus.publish(subject, payload)
        except BusUnavailable:  # or it has stopped reading, and its connection stands
            self._is_behind = True
        self._count += 1
        invocation = subject.rpartition(".")[2]
        self._forget(invocation)
        self._kept[invocation] = _Reply(self._count, self._loop.time(), subject, payload)
        self._bytes += len(payload)
        while len(self._kept) > _MOST or self._bytes > _MOST_BYTES:
            self._forget(next(iter(self._kept)))

    def repeat(self, invocation: str) -> None:
        """Somebody looks for this call: if it has ended here, he has not heard."""
        if (reply := self._kept.get(invocation)) is not None:
            self._publish(reply)

    def tick(self) -> None:
        if self._is_behind:
            self._send_again()
        elif self._sure_to < self._count and self._bus.connected and not self._is_confirming:
            self._confirming = self._loop.create_task(self.confirm(), name="replies")
        over = self._loop.time() - _KEPT_S
        while self._kept and (first := next(iter(self._kept.values()))).number <= self._sure_to:
            if first.at >= over and self._bytes <= _MOST_SURE_BYTES:
                break
            self._forget(next(iter(self._kept)))

    async def confirm(self) -> None:
        """Note which ones the server has by now."""
        sent = self._count
        with contextlib.suppress(BusUnavailable):
            await self._bus.flush()
            self._sure_to = sent

    @property
    def _is_confirming(self) -> bool:
        return self._confirming is not None and not self._confirming.done()

    def _forget(self, invocation: str) -> None:
        if (reply := self._kept.pop(invocation, None)) is not None:
            self._bytes -= len(reply.payload)

    def _send_again(self) -> None:
        self._is_behind = False
        for reply in self._kept.values():
            if reply.number > self._sure_to and not self._publish(reply):
                self._is_behind = True
                return

    def _publish(self, reply: _Reply) -> bool:
        """False while the bus is away."""
        try:
            self._bus.publish(reply.subject, reply.payload)
        except PayloadTooLarge:
            log.warning("dropped a reply of %d bytes that the bus does not take", len(reply.payload))
        except BusUnavailable:
            return False
        return True
