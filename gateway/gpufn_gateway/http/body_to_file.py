"""A large request body on its way from the socket to where it is kept, past the HTTP parser.

uvicorn copies a body three times in pieces of 64 KiB and lets the socket rest after each, which is most of what 10 MiB
cost. From the moment that a body's length is known and somebody wants it whole, its bytes are read into one buffer and
written from there; the parser sees the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

from gpufn_gateway.http.body_reader import ClientGone, Write

_BUFFER_BYTES: Final = 256 << 10


class Owner(Protocol):
    """The HTTP protocol of a connection."""

    def data_came(self, count: int) -> None: ...
    def body_ended(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class LargeBody:
    """What an application gets as `receive` of a request with a body of `length` bytes. `cycle` is uvicorn's."""

    def __init__(self, owner: Owner, cycle: Any, length: int) -> None:
        self._owner = owner
        self._cycle = cycle
        self._receive: Callable[[], Awaitable[MutableMapping[str, Any]]] = cycle.receive
        self._left = length  # of the body, for `write_into`

    async def __call__(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        return message

    async def write_into(self, write: Write) -> None:
        """All of the body that has not been received, in order. Raises ClientGone, and what `write` does."""
        message = await self()
        if message["type"] != "http.request":
            raise ClientGone
        write(message["body"])
        if not message["more_body"]:
            return
        cycle, flow = self._cycle, self._cycle.flow
        reading = _Reading(self._owner, flow.pause_reading, self._left, write)
        _hand_over(flow, cycle.transport, reading)
        try:
            await reading.ended
        finally:
            if reading.left:
                cycle.keep_alive = False  # nobody knows any more where the next request begins
            if not cycle.disconnected:
                _hand_over(flow, cycle.transport, self._owner)
        self._left = 0
        self._owner.body_ended()
        cycle.message_event.clear()  # what is to come of this request is its client's leaving


def _hand_over(flow: Any, transport: Any, protocol: Any) -> None:
    """A transport looks at what its protocol can do when it begins to read."""
    flow.pause_reading()
    transport.set_protocol(protocol)
    flow.resume_reading()


class _Reading(asyncio.BufferedProtocol):
    """Has the connection for the `left` bytes of a body. `ended` raises ClientGone, and what `write` does; reading has
    stopped then."""

    def __init__(self, owner: Owner, stop: Callable[[], object], left: int, write: Write) -> None:
        self.left = left
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._stop = stop
        self._write = write
        self._buffer = memoryview(bytearray(min(left, _BUFFER_BYTES)))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self.left]

    def buffer_updated(self, nbytes: int) -> None:
        self._owner.data_came(nbytes)
        self.left -= nbytes
        try:
            self._write(self._buffer[:nbytes])
        except Exception as error:
            self._stop()
            self._end(error)
        else:
            if not self.left:
                self._stop()  # at once: the transport would read on, and there is no room
                self._end(None)

    def eof_received(self) -> None:
        """The transport closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)
        self._end(ClientGone())

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def _end(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
