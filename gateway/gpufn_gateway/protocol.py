"""uvicorn's HTTP protocol, with the limits that it lacks: how large a request's head may be and what stands beside its
body, how many requests may come ahead of their turn, and how long a client may stall, in sending and in reading. Costs
the ordinary request, which arrives whole, one addition and one look at the clock. What is no HTTP is refused in the
words of all our errors, and a client that asks to change the protocol is served on in this one.

`sweep` hangs up on those that stalled; something calls it about once a second.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import http
import struct
import termios
from collections.abc import Iterable, Sized
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpufn.errors import RequestError
from gpufn.parcels import LEAST_BYTES
from gpufn_gateway.joined_writes import JoinedWrites
from gpufn_gateway.large_body import LargeBody
from gpufn_gateway.problems import Problem
from gpufn_gateway.unread import Unread

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
_MOST_AHEAD = 16  # requests that wait for their turn while more are read
_HEAD_S = 10.0  # a head must be complete so long after its first byte
_BODY_IDLE_S = 10.0  # and its body must not pause for longer
_FIRST_BYTE_S = 30.0  # browsers connect ahead of need

_REFUSAL = (
    "HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\nconnection: close\r\n"
    "content-length: {length}\r\n\r\n{body}"
)


def _refusal(status: int, detail: str) -> bytes:
    problem = Problem(status, RequestError(detail).info())
    body = problem.body().decode()
    title = http.HTTPStatus(status).phrase
    return _REFUSAL.format(status=status, title=title, length=len(body), body=body).encode()


_TOO_LARGE = _refusal(431, f"The request's headers are larger than {MAX_HEAD_BYTES >> 10} KiB.")
_NO_HTTP = _refusal(400, "This is not a valid HTTP/1.1 request. (Is the client speaking HTTPS or HTTP/2?)")


class _Phase(enum.Enum):
    BETWEEN = enum.auto()  # requests: none has begun, or the last one has been received whole
    HEAD = enum.auto()
    BODY = enum.auto()


class _Flow(FlowControl):
    """Reads on only while few requests wait for their turn: each takes a hundred times the bytes that it came in.
    uvicorn would after each answer, and whenever a body is asked for."""

    def __init__(self, transport: asyncio.Transport, ahead: Sized) -> None:
        super().__init__(transport)
        self._ahead = ahead

    def resume_reading(self) -> None:
        if len(self._ahead) <= _MOST_AHEAD:
            super().resume_reading()


class GuardedProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._phase = _Phase.BETWEEN
        self._head_bytes = 0  # or those that stand beside its body, since the last part of that
        self._head_since = 0.0
        self._last_data = 0.0
        self._got_on = False  # with a request, by the data that is being parsed
        self._asks_for_upgrade = False  # the request that is being parsed
        self._unread = Unread()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self.transport = JoinedWrites(transport)  # type: ignore[assignment]
        self._last_data = self.loop.time()

    def data_received(self, data: bytes) -> None:
        self._got_on = False
        self._last_data = self.loop.time()
        self._feed(data)
        # Of data that ended another request nobody knows how much belongs to this head; it is one read at most. Beside
        # a body stand the lengths of its chunks, with whatever its sender adds to them, and fields after the last one.
        if self._phase is not _Phase.BETWEEN and not self._got_on and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._asks_for_upgrade:
                self._serve_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(_NO_HTTP)

    def _serve_without_upgrade(self, rest: bytes) -> None:
        """Parse the request again as one that asks for nothing.

        The parser takes it to have no body, and whatever follows to be of the other protocol; but such clients (Java's
        asks for h2c by default) send the body, and go on in HTTP/1.1 when nothing else is offered.
        """
        method = self.parser.get_method()
        headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)
        self._asks_for_upgrade = False
        self._feed(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, self.url, headers, rest))

    def on_message_begin(self) -> None:
        self._phase = _Phase.HEAD
        self._head_bytes = 0
        self._head_since = self._last_data
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._asks_for_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._asks_for_upgrade:
            return
        self._get_on(_Phase.BODY)
        super().on_headers_complete()
        if (length := _length(self.headers)) >= LEAST_BYTES:
            self.cycle.receive = LargeBody(self, self.cycle, length)  # type: ignore[method-assign, assignment]
        self.headers = []  # the request has its own; fields behind its body come here, and are nobody's

    def on_body(self, body: bytes) -> None:
        self._get_on(_Phase.BODY)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._get_on(_Phase.BETWEEN)
        super().on_message_complete()

    def _get_on(self, phase: _Phase) -> None:
        self._phase = phase
        self._got_on = True
        self._head_bytes = 0

    def data_came(self) -> None:
        """Of a body that is read past the parser."""
        self._last_data = self.loop.time()

    def body_ended(self) -> None:
        """A body that was read past the parser, which waits for it still: the next request has another."""
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def has_stalled(self, now: float) -> bool:
        """True when the rest of a request, or the first of one, is overdue. `now` on the loop's clock."""
        if self._phase is _Phase.HEAD:
            return not self.flow.read_paused and now - self._head_since > _HEAD_S
        if self._phase is _Phase.BODY:
            return not self.flow.read_paused and now - self._last_data > _BODY_IDLE_S
        return self.cycle is None and now - self._last_data > _FIRST_BYTE_S

    def has_stopped_reading(self, now: float) -> bool:
        """True when what is written for the client has been waiting for a minute."""
        here = self.transport.get_write_buffer_size()
        in_kernel = _bytes_in_kernel(self.transport.get_extra_info("socket").fileno()) if here else 0
        return self._unread.is_left(here, in_kernel, now)

    def _refuse(self, refusal: bytes) -> None:
        has_begun = False
        if self.cycle is not None and not self.cycle.response_complete:
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True  # an earlier request's answer has nowhere to go
            self.cycle.message_event.set()
        if not has_begun:
            self.transport.write(refusal)
        self.transport.close()


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """In bytes; 0 of a body in chunks."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def _bytes_in_kernel(descriptor: int) -> int:
    """What a socket has taken and its peer has not acknowledged. It may be megabytes, so that a slow reader takes
    minutes until it takes more; 0 where the kernel does not tell."""
    try:
        answer = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # one that is being closed has no descriptor
        return 0
    return int(struct.unpack("i", answer)[0])


def sweep(connections: Iterable[Any], now: float) -> int:
    """Hang up on clients that stalled; returns on how many."""
    count = 0
    for connection in connections:
        if not isinstance(connection, GuardedProtocol):
            continue
        if connection.has_stopped_reading(now):
            connection.transport.abort()  # to close it would wait for what is unread
        elif connection.has_stalled(now):
            connection.transport.close()
        else:
            continue
        count += 1
    return count
