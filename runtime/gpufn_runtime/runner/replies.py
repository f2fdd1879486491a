"""Replies to who waits, kept until the bus has them for certain: they are sent again after each reconnect.

A server that hangs, or dies, or is cut off, takes what was last written to it along; what such a reply was for has
ended, and does not run again. Who hears one twice drops the second. Bounded: the oldest go first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Final, NamedTuple

from gpufn.bus.connection import Bus
from gpufn.errors import BusUnavailable, PayloadTooLarge

log = logging.getLogger(__name__)

_MOST: Final = 1000
_MOST_BYTES: Final = 64 << 20


class _Reply(NamedTuple):
    number: int
    subject: str
    payload: bytes


class Replies:
    """The owner calls `tick` each second."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._unsure: deque[_Reply] = deque()
        self._bytes = 0
        self._count = 0
        self._is_behind = False  # not all of them have been sent
        self._confirming: asyncio.Task[None] | None = None
        bus.on_reconnect(self._send_again)

    def send(self, subject: str, payload: bytes) -> None:
        """Now, or when the bus is back. Raises PayloadTooLarge."""
        try:
            self._bus.publish(subject, payload)
        except BusUnavailable:  # or it has stopped reading, and its connection stands
            self._is_behind = True
        self._count += 1
        self._unsure.append(_Reply(self._count, subject, payload))
        self._bytes += len(payload)
        while len(self._unsure) > _MOST or self._bytes > _MOST_BYTES:
            self._forget_first()

    def tick(self) -> None:
        if self._is_behind:
            self._send_again()
        elif self._unsure and self._bus.connected and (self._confirming is None or self._confirming.done()):
            self._confirming = asyncio.get_running_loop().create_task(self.confirm(), name="replies")

    async def confirm(self) -> None:
        """Forget those that the server has by now."""
        sent = self._count
        with contextlib.suppress(BusUnavailable):
            await self._bus.flush()
            while self._unsure and self._unsure[0].number <= sent:
                self._forget_first()

    def _forget_first(self) -> None:
        self._bytes -= len(self._unsure.popleft().payload)

    def _send_again(self) -> None:
        self._is_behind = False
        for reply in self._unsure:
            try:
                self._bus.publish(reply.subject, reply.payload)
            except PayloadTooLarge:
                log.warning("dropped a reply of %d bytes that the bus does not take", len(reply.payload))
            except BusUnavailable:
                self._is_behind = True
                return
