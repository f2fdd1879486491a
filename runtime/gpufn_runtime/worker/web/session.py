"""A web session in the worker, on its event loop: input that arrives and events that are sent."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final, Generic, TypeVar

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.frames import InputTaken, Item
from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW
from gpufn_core.protocol.streams.web_session import (
    CREDIT_REPEATED_S,
    DOWN_WINDOW_BYTES,
    UP_WINDOW_BYTES,
    Disconnect,
    Down,
    Up,
)
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.link import Link

Head = TypeVar("Head")

_LONGEST_SILENCE_S: Final = 30.0  # an idle session repeats its credit less and less often


class Session(Generic[Head]):
    """`request` is the head of the session: a WebRequest, or the Start of a terminal. `body` is the first part of the
    request's body. `changed` is set when the reader grants credit."""

    def __init__(self, attempt: Attempt, request: Head, body: bytes, *, link: Link, changed: asyncio.Event) -> None:
        self.request = request
        self.body = body
        self._attempt = attempt
        self._link = link
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._input: deque[tuple[Up, bytes, int]] = deque()
        self._arrived = asyncio.Event()
        self._next = 0  # number of the next event
        self._is_cut = False  # an event was lost
        self._is_ended = False
        self.heard_at = time.monotonic()  # when the last event arrived
        self.is_disconnected = False  # the client has left; the event may not have been received yet
        self._taken = self._reported = 0  # bytes of input
        self._sent = self._read = 0  # events
        self._unread: deque[int] = deque()  # sizes of events that the reader has not taken
        self._unread_bytes = 0
        attempt.on_input = self._on_input
        self._report()

    # --- input --------------------------------------------------------------------------------------------------------

    async def receive(self) -> tuple[Up, bytes]:
        """Return the next event, with its bytes. Raises BusUnavailable if one was lost."""
        silence_s = CREDIT_REPEATED_S
        while not self._input:
            if self._is_ended:
                return Disconnect(web_session.NORMAL_CLOSE), b""
            if self._is_cut:
                raise BusUnavailable("the message bus lost a part of this session's input")
            self._arrived.clear()
            try:
                async with asyncio.timeout(silence_s):
                    await self._arrived.wait()
            except TimeoutError:
                self._report(waits=True)
                silence_s = min(2 * silence_s, _LONGEST_SILENCE_S)
        event, data, size = self._input.popleft()
        self._taken += size
        if self._taken - self._reported >= UP_WINDOW_BYTES // 4:
            self._report()
        return event, data

    def end_input(self) -> None:
        """Let `receive` return a Disconnect instead of waiting: the response is complete."""
        self._is_ended = True
        self._arrived.set()

    def _on_input(self, number: int, payload: bytes) -> None:
        """Called in the reader's thread."""
        self._loop.call_soon_threadsafe(self._add, number, payload)

    def _add(self, number: int, payload: bytes) -> None:
        self.heard_at = time.monotonic()
        if number == self._next and not self._is_cut:
            self._next += 1
            event, data = web_session.unpack_up(payload)
            self.is_disconnected |= isinstance(event, Disconnect)
            self._input.append((event, data, web_session.size_of(payload)))
        else:
            self._is_cut = True
        self._arrived.set()

    def _report(self, *, waits: bool = False) -> None:
        self._reported = self._taken
        self._link.send(InputTaken(self._attempt.run.attempt, self._taken, waits), link=self._attempt.link)

    # --- output -------------------------------------------------------------------------------------------------------

    async def send(self, event: Down, data: bytes = b"") -> None:
        """Send an event as soon as its reader has room for it."""
        while not self._has_room():
            self._changed.clear()
            if not self._has_room():
                await self._changed.wait()
        self.send_now(event, data)

    def send_now(self, event: Down, data: bytes = b"") -> None:
        """Send the first event of a session, for which there is room."""
        payload = pack(event, data)
        self._link.send(Item(self._attempt.run.attempt, web_session.CONTENT_TYPE), payload, link=self._attempt.link)
        self._sent += 1
        self._unread.append(len(payload))
        self._unread_bytes += len(payload)

    def _has_room(self) -> bool:
        granted = self._attempt.credits
        while self._read < granted - STREAM_WINDOW and self._unread:
            self._read += 1
            self._unread_bytes -= self._unread.popleft()
        return self._sent < granted and self._unread_bytes < DOWN_WINDOW_BYTES
