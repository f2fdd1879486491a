"""Receive a large request body past the HTTP parser, from the socket into a file or buffer.

uvicorn copies a body three times in pieces of 64 KiB and pauses the socket after each piece. That is most of the cost
of a 10 MiB body. Once the length of a body is known and the application wants all of it, this module reads the bytes
into one buffer and writes them from there. The parser sees only the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

from gpufn_gateway.http.body_reader import ClientDisconnected, Write

_BUFFER_BYTES: Final = 256 << 10


class Owner(Protocol):
    """The HTTP protocol of a connection."""

    def count_received(self, count: int) -> None: ...
    def body_received(self) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class LargeBody:
    """The ASGI `receive` of a request with a body of `length` bytes. `cycle` is uvicorn's RequestResponseCycle."""

    def __init__(self, owner: Owner, cycle: Any, length: int) -> None:
        self._owner = owner
        self._cycle = cycle
        self._receive: Callable[[], Awaitable[MutableMapping[str, Any]]] = cycle.receive
        self._remaining = length  # bytes of the body that were not received yet

    async def __call__(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._remaining -= len(message.get("body", b""))
        return message

    async def write_into(self, write: Write) -> None:
        """Write the rest of the body, in order. Raises ClientDisconnected, and the exceptions of `write`."""
        message = await self()
        if message["type"] != "http.request":
            raise ClientDisconnected
        write(message["body"])
        if not message["more_body"]:
            return
        cycle, flow = self._cycle, self._cycle.flow
        reader = _BodyProtocol(self._owner, flow.pause_reading, self._remaining, write)
        _set_protocol(flow, cycle.transport, reader)
        try:
            await reader.finished
        finally:
            if reader.remaining:
                cycle.keep_alive = False  # the start of the next request is no longer known
            if not cycle.disconnected:
                _set_protocol(flow, cycle.transport, self._owner)
        self._remaining = 0
        self._owner.body_received()
        cycle.message_event.clear()  # the next event of this request is http.disconnect


def _set_protocol(flow: Any, transport: Any, protocol: Any) -> None:
    """Switch protocols with reading paused: a transport checks its protocol's type when it starts to read."""
    flow.pause_reading()
    transport.set_protocol(protocol)
    flow.resume_reading()


class _BodyProtocol(asyncio.BufferedProtocol):
    """The connection's protocol while the `remaining` bytes of a body arrive.

    `finished` raises ClientDisconnected and the exceptions of `write`; reading has stopped by then.
    """

    def __init__(self, owner: Owner, stop_reading: Callable[[], object], remaining: int, write: Write) -> None:
        self.remaining = remaining
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = owner
        self._stop_reading = stop_reading
        self._write = write
        self._buffer = memoryview(bytearray(min(remaining, _BUFFER_BYTES)))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self.remaining]

    def buffer_updated(self, nbytes: int) -> None:
        self._owner.count_received(nbytes)
        self.remaining -= nbytes
        try:
            self._write(self._buffer[:nbytes])
        except Exception as error:
            self._stop_reading()
            self._finish(error)
        else:
            if not self.remaining:
                self._stop_reading()  # now: the transport would continue to read, and the buffer has no room
                self._finish(None)

    def eof_received(self) -> None:
        """Return None, so that the transport closes itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)
        self._finish(ClientDisconnected())

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def _finish(self, error: Exception | None) -> None:
        if self.finished.done():
            return
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)
