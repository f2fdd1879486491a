"""uvicorn's HTTP protocol with the limits and checks that it lacks.

- Limits: the size of a request's head and of the framing of its body, the requests that wait for their turn, the pace
  of a client that sends or reads, and the connections of one address.
- A head that breaks the rules of HTTP is refused in the words of all our errors (`head_rules`).
- An upload that is refused is read for a while, so that its client reads the answer (`closing`).
- A client that asks to change the protocol is served on in this one.

An ordinary request, which arrives whole, pays one look at the clock and the check of its head. `sweep` closes the
connections of clients that are too slow; something calls it about once a second.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import http
import struct
import termios
from collections.abc import Iterable, Mapping, MutableMapping, Sized
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpufn_core.errors import CapacityError, GpufnError, RequestError
from gpufn_gateway.http import head_rules
from gpufn_gateway.http.body_to_file import LargeBody
from gpufn_gateway.http.connection_limit import ConnectionLimit
from gpufn_gateway.http.lingering_close import ClosingTransport
from gpufn_gateway.http.minimum_rate import FIRST_BYTE_S, HEAD_S, BodyPace, Discarding
from gpufn_gateway.http.slow_reader import Unread
from gpufn_gateway.problems import Problem
from gpufn_platform.shared_bodies.bodies import LEAST_BYTES

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
_MOST_AHEAD = 16  # requests that wait for their turn while more are read

_REFUSAL = (
    "HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\nconnection: close\r\n"
    "content-length: {length}\r\n\r\n{body}"
)


def _refusal(status: int, error: GpufnError) -> bytes:
    problem = Problem(status, error.info())
    body = problem.body().decode()
    title = http.HTTPStatus(status).phrase
    return _REFUSAL.format(status=status, title=title, length=len(body), body=body).encode()


def _bad(status: int, detail: str) -> bytes:
    return _refusal(status, RequestError(detail))


_TOO_LARGE = _bad(431, f"The request's headers are larger than {MAX_HEAD_BYTES >> 10} KiB.")
_NO_HTTP = _bad(400, "This is not a valid HTTP/1.1 request. (Is the client speaking HTTPS or HTTP/2?)")
_TOO_MANY = _refusal(
    503,
    CapacityError(
        "Your address has as many connections open as the gateway allows: close some, or use them again. "
        "(GPUFN_MAX_CONNECTIONS_PER_ADDRESS sets the limit.)"
    ),
)


class _Refused(Exception):
    """Raised inside the parser's callbacks; `answer` is sent in place of the request's."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer)
        self.answer = answer


class _Phase(enum.Enum):
    BETWEEN = enum.auto()  # requests: none has begun, or the last one has been received whole
    HEAD = enum.auto()
    BODY = enum.auto()
    CLOSING = enum.auto()  # the answer is sent, and what arrives is discarded


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
    """`limit` is shared by all connections of a server."""

    def __init__(self, *args: Any, limit: ConnectionLimit | None = None, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._limit = limit
        self._phase = _Phase.BETWEEN
        self._read_bytes = 0  # by the latest read
        self._received = 0  # bytes of the connection
        self._head_bytes = 0  # at least; or those that stand beside its body, since the last part of that
        self._most_head_bytes = 0  # at most: a read may hold the end of another request as well
        self._head_since = 0.0
        self._last_data = 0.0
        self._got_on = False  # with a request, by the data that is being parsed
        self._asks_for_upgrade = False  # the request that is being parsed
        self._is_shutting_down = False
        self._connected_at = 0.0
        self._pace = BodyPace()
        self._discarding = Discarding()
        self._unread = Unread()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self.transport = ClosingTransport(transport, self._discard)  # type: ignore[assignment]
        self._last_data = self._connected_at = self.loop.time()
        if self._limit is not None and not self._limit.opened(self._address()):
            self._limit = None  # it was not counted
            self.transport.write(_TOO_MANY)
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._limit is not None:
            self._limit.closed(self._address())
        super().connection_lost(exc)

    def _address(self) -> str:
        return self.client[0] if self.client is not None else ""

    def shutdown(self) -> None:
        self._is_shutting_down = True
        if self._phase is _Phase.CLOSING:
            self.hang_up()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._phase is _Phase.CLOSING:
            return
        self._read_bytes = len(data)
        if self._phase is _Phase.HEAD:
            self._most_head_bytes += len(data)
        self._got_on = False
        self._last_data = self.loop.time()
        self._feed(data)
        # Of data that ended another request nobody knows how much belongs to this head, until that is complete. Beside
        # a body stand the lengths of its chunks, with whatever its sender adds to them, and fields after the last one.
        if self._phase in (_Phase.HEAD, _Phase.BODY) and not self._got_on and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._asks_for_upgrade:
                self._serve_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.answer if isinstance(cause, _Refused) else _NO_HTTP)

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
        self._unset_keepalive_if_required()  # not before: a client could send empty lines for ever
        self._phase = _Phase.HEAD
        self._head_bytes = 0
        self._most_head_bytes = self._read_bytes
        self._head_since = self._last_data
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unset_keepalive_if_required()  # it may have been set since the head began, by the answer before
        fields = dict(self.headers)
        self._check_head(fields)
        self._asks_for_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._asks_for_upgrade:
            return
        self._get_on(_Phase.BODY)
        super().on_headers_complete()
        if self.expect_100_continue:
            _close_unless_continued(self.cycle)
        if (length := int(fields.get(b"content-length", 0))) >= LEAST_BYTES:
            self.cycle.receive = LargeBody(self, self.cycle, length)  # type: ignore[method-assign, assignment]
        self.headers = []  # the request has its own; fields behind its body come here, and are nobody's

    def _check_head(self, fields: Mapping[bytes, bytes]) -> None:
        """Raises _Refused."""
        if self._most_head_bytes > MAX_HEAD_BYTES and head_rules.size(self.url, self.headers) > MAX_HEAD_BYTES:
            raise _Refused(_TOO_LARGE)
        fault = head_rules.fault(self.parser.get_http_version(), self.url, self.headers, fields)
        if fault is not None:
            raise _Refused(_bad(400, fault))

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

    def data_came(self, count: int) -> None:
        """`count` bytes of a body that is read past the parser."""
        self._received += count

    def body_ended(self) -> None:
        """A body that was read past the parser, which waits for it still: the next request has another."""
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def has_stalled(self, now: float) -> bool:
        """True when the rest of a request, or the first of one, is overdue. `now` on the loop's clock."""
        is_paused = self.flow.read_paused
        if self._phase is _Phase.HEAD:
            if is_paused:
                self._head_since = now
            return now - self._head_since > HEAD_S
        if self._phase is _Phase.BETWEEN:  # the time between two requests is bounded by uvicorn
            return self.cycle is None and now - self._connected_at > FIRST_BYTE_S
        is_answered = self._phase is _Phase.CLOSING or self.cycle.response_complete
        if is_answered and self._discarding.is_over(self.cycle, self._received, now):
            return True
        return self._pace.is_too_slow(self.cycle, self._received, now, is_paused=is_paused)

    def hang_up(self) -> None:
        """Close at once, whatever the client still sends."""
        transport: Any = self.transport
        transport.close_now()

    def has_stopped_reading(self, now: float) -> bool:
        """True when what is written for the client has been waiting for a minute."""
        here = self.transport.get_write_buffer_size()
        in_kernel = _bytes_in_kernel(self.transport.get_extra_info("socket").fileno()) if here else 0
        return self._unread.is_left(here, in_kernel, now)

    def _refuse(self, refusal: bytes) -> None:
        has_begun = bool(self.pipeline)  # the request that runs, then, is not `cycle`
        if self.cycle is not None and not self.cycle.response_complete:
            has_begun = has_begun or self.cycle.response_started
            self.cycle.disconnected = True  # an earlier request's answer has nowhere to go
            self.cycle.message_event.set()
        if not has_begun:
            self.transport.write(refusal)
        self._phase = _Phase.HEAD  # whatever the client takes it for, it may still send
        self.transport.close()

    def _discard(self) -> bool:
        """Read on without an answer, unless the request is complete. True when it does."""
        if self._phase is _Phase.BETWEEN or self._is_shutting_down:
            return False
        self._phase = _Phase.CLOSING
        self.pipeline.clear()
        self.flow.resume_reading()
        return True


def _close_unless_continued(cycle: Any) -> None:
    """An answer that comes before "100 Continue" ends the connection: its client may send the body or not, so that
    nobody knows where the next request begins."""
    receive, keep_alive = cycle.receive, cycle.keep_alive

    async def continued() -> MutableMapping[str, Any]:
        cycle.keep_alive = keep_alive
        message: MutableMapping[str, Any] = await receive()
        return message

    cycle.keep_alive = False
    cycle.receive = continued


def _bytes_in_kernel(descriptor: int) -> int:
    """What a socket has taken and its peer has not acknowledged. It may be megabytes, so that a slow reader takes
    minutes until it takes more; 0 where the kernel does not tell."""
    try:
        answer = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # one that is being closed has no descriptor
        return 0
    return int(struct.unpack("i", answer)[0])


def sweep(connections: Iterable[Any], now: float) -> int:
    """Hang up on clients that are too slow; returns on how many."""
    count = 0
    for connection in connections:
        if not isinstance(connection, GuardedProtocol):
            continue
        if connection.has_stopped_reading(now):
            connection.transport.abort()  # to close it would wait for what is unread
        elif connection.has_stalled(now):
            connection.hang_up()
        else:
            continue
        count += 1
    return count
