"""uvicorn's HTTP protocol with additional limits and checks.

- It limits the size of a request's head and of the framing of its body, the number of pipelined requests, how slowly a
  client may send or read, and the connections per address.
- It rejects a head that violates HTTP with a problem response (`head_rules`).
- It reads on for a while after it has rejected an upload, so that the client can read the response (`lingering_close`).
- It passes connections of HTTP/2 on (`http2_tunnel`).
- It upgrades to WebSocket for paths of web functions and terminals only, and ignores other requests to upgrade.
- It leaves the caching of responses of web functions, and of the console's files, to them.
- It gives each request its id (`request_id`).

An ordinary request, which arrives in one read, costs one clock read and the check of its head. `sweep` closes the
connections of clients that are too slow; call it about once a second.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import http
import re
import struct
import termios
from collections.abc import Iterable, Mapping, MutableMapping, Sized
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpufn_core.errors import CapacityError, GpufnError, RequestError
from gpufn_core.spec import web_spec
from gpufn_core.spec.units import format_bytes
from gpufn_gateway.http import request_id
from gpufn_gateway.http.body_to_file import LargeBody
from gpufn_gateway.http.connection import head_rules
from gpufn_gateway.http.connection.connection_limit import ConnectionLimit
from gpufn_gateway.http.connection.http2_tunnel import PREFACE, Http2
from gpufn_gateway.http.connection.lingering_close import ClosingTransport
from gpufn_gateway.http.connection.minimum_rate import FIRST_BYTE_S, HEAD_S, BodyPace, Discarding
from gpufn_gateway.http.connection.slow_reader import UnreadOutput
from gpufn_gateway.http.connection.websocket import WebSocketConnection
from gpufn_gateway.problems import Problem
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
_WEB_PREFIX = web_spec.PREFIX.encode()
_CACHING_PREFIXES = (_WEB_PREFIX, b"/console/static/")  # their responses have their own caching fields
_TERMINAL = re.compile(rb"/v1/functions/[^?]+/exec")
_MAX_PIPELINED = 16  # requests that wait while more are read

_ERROR_RESPONSE = (
    "HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\nconnection: close\r\n"
    "content-length: {length}\r\n\r\n{body}"
)


def _error_response(status: int, error: GpufnError) -> bytes:
    problem = Problem(status, error.info())
    body = problem.body().decode()
    title = http.HTTPStatus(status).phrase
    return _ERROR_RESPONSE.format(status=status, title=title, length=len(body), body=body).encode()


def _bad_request(status: int, detail: str) -> bytes:
    return _error_response(status, RequestError(detail))


_TOO_LARGE = _bad_request(431, f"The request's headers are larger than {format_bytes(MAX_HEAD_BYTES)}.")
_NOT_HTTP = _bad_request(
    400, "This is not a valid HTTP/1.1 request. (Is the client speaking HTTPS? For gRPC, install gpufn[grpc].)"
)
_TOO_MANY_CONNECTIONS = _error_response(
    503,
    CapacityError(
        "Your address has too many open connections: close some, or reuse them. "
        "(GPUFN_MAX_CONNECTIONS_PER_ADDRESS sets the limit.)"
    ),
)


class _Rejected(Exception):
    """Raised inside the parser's callbacks; `response` is sent instead of the request's own response."""

    def __init__(self, response: bytes) -> None:
        super().__init__(response)
        self.response = response


class _Phase(enum.Enum):
    BETWEEN = enum.auto()  # between requests: none has started, or the last one has been received completely
    HEAD = enum.auto()
    BODY = enum.auto()
    CLOSING = enum.auto()  # the response is sent, and incoming data is discarded


# Each request needs these, and Python looks up a member of an enum slowly.
_BETWEEN, _HEAD, _BODY, _CLOSING = _Phase.BETWEEN, _Phase.HEAD, _Phase.BODY, _Phase.CLOSING
_INCOMPLETE = (_HEAD, _BODY)


class _Flow(FlowControl):
    """Resume reading only while few pipelined requests wait: each takes a hundred times its bytes on the wire.

    uvicorn would resume after each response, and whenever the application receives a body.
    """

    def __init__(self, transport: asyncio.Transport, ahead: Sized) -> None:
        super().__init__(transport)
        self._ahead = ahead

    def resume_reading(self) -> None:
        if len(self._ahead) <= _MAX_PIPELINED:
            super().resume_reading()


class GuardedProtocol(HttpToolsProtocol):
    """The protocol of one connection. `limit` and `http2` are shared by all connections of a server."""

    def __init__(
        self, *args: Any, limit: ConnectionLimit | None = None, http2: Http2 | None = None, **fields: Any
    ) -> None:
        super().__init__(*args, **fields)
        self._limit = limit
        self._http2 = http2
        self._phase = _BETWEEN
        self._read_bytes = 0  # size of the latest read
        self._received = 0  # bytes received on the connection
        self._head_bytes = 0  # lower bound of the head's size; in a body: framing bytes since its last part
        self._max_head_bytes = 0  # upper bound of the head's size: a read may also hold the end of another request
        self._head_since = 0.0
        self._last_data = 0.0
        self._made_progress = False  # the data that is being parsed completed a head, a body part or a request
        self._wants_upgrade = False  # the request that is being parsed
        self._shutting_down = False
        self._connected_at = 0.0
        self._pace = BodyPace()
        self._discarding = Discarding()
        self._unread_output = UnreadOutput()
        self._is_delivered = False  # the connection is closed, and the client has all output

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket_transport = transport
        self.flow = _Flow(transport, self.pipeline)
        self.transport = ClosingTransport(transport, self._discard)  # type: ignore[assignment]
        self._last_data = self._connected_at = self.loop.time()
        if self._limit is not None and not self._limit.add(self._address()):
            self._limit = None  # the connection was not counted
            self.transport.write(_TOO_MANY_CONNECTIONS)
            self.disconnect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        super().connection_lost(exc)

    def _address(self) -> str:
        return self.client[0] if self.client is not None else ""

    def shutdown(self) -> None:
        self._shutting_down = True
        if self._phase is _CLOSING:
            self.disconnect()
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._phase is _CLOSING:
            return
        self._read_bytes = len(data)
        if self._phase is _HEAD:
            self._max_head_bytes += len(data)
        self._made_progress = False
        self._last_data = self.loop.time()
        self._feed(data)
        # If the data also ended another request, the share of this head is unknown until the head is complete. A
        # chunked body has framing beside its data: chunk lengths, chunk extensions and trailer fields.
        if self._phase in _INCOMPLETE and not self._made_progress and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._reject(_TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if self._wants_upgrade and self._may_become_socket():
                self._become_socket(rest)
            elif self._wants_upgrade:
                self._serve_without_upgrade(rest)
        except httptools.HttpParserError as error:
            if self._http2 is not None and len(data) == self._received and data.startswith(PREFACE):
                self._pass_on(self._http2, data)
                return
            cause = error.__context__
            self._reject(cause.response if isinstance(cause, _Rejected) else _NOT_HTTP)

    def _pass_on(self, http2: Http2, data: bytes) -> None:
        """Pass on a connection that began with HTTP/2. It stays counted until it ends."""
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        http2.accept(self._socket_transport, data, self.client or ("", 0), self.connections, self._release)

    def _may_become_socket(self) -> bool:
        is_free = self.cycle is None or self.cycle.response_complete
        has_sockets = self.url.startswith(_WEB_PREFIX) or _TERMINAL.fullmatch(self.url) is not None
        wants_one = self.parser.get_method() == b"GET" and self._get_upgrade() == b"websocket"
        return has_sockets and is_free and wants_one and not self._shutting_down

    def _become_socket(self, rest: bytes) -> None:
        """Hand the connection to the protocol of WebSockets, which parses the request again."""
        self._phase = _BETWEEN
        self.connections.discard(self)
        self._unset_keepalive_if_required()
        protocol = WebSocketConnection(
            config=self.config, server_state=self.server_state, app_state=self.app_state, release=self._release
        )
        protocol.connection_made(self._socket_transport)
        self.transport.set_protocol(protocol)
        head = b"".join(b"%b: %b\r\n" % header for header in self.headers)
        protocol.data_received(b"GET %b HTTP/1.1\r\n%b\r\n%b" % (self.url, head, rest))

    def _release(self) -> None:
        if self._limit is not None:
            self._limit.remove(self._address())

    def _serve_without_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its Upgrade field.

        The parser assumes that an upgrade request has no body and that the data after it is in the other protocol. But
        such clients send the body, and go on in HTTP/1.1 if the server does not upgrade. Java's client requests h2c by
        default.
        """
        method = self.parser.get_method()
        headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)
        self._wants_upgrade = False
        self._feed(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, self.url, headers, rest))

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()  # not earlier: a client could send empty lines forever
        self._phase = _HEAD
        self._head_bytes = 0
        self._max_head_bytes = self._read_bytes
        self._head_since = self._last_data
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._unset_keepalive_if_required()  # the previous response may have set it since the head began
        fields = dict(self.headers)
        self._check_head(fields)
        self._wants_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._wants_upgrade:
            return
        self._enter_phase(_BODY)
        self.scope[request_id.SCOPE_KEY] = this = request_id.of(fields)  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        caches_itself = self.url.startswith(_CACHING_PREFIXES)
        defaults = self._web_defaults if caches_itself else self.cycle.default_headers
        self.cycle.default_headers = [*defaults, (request_id.FIELD, this)]
        if self.expect_100_continue:
            _close_unless_continued(self.cycle)
        if (length := int(fields.get(b"content-length", 0))) >= MIN_SHARED_BYTES:
            self.cycle.receive = LargeBody(self, self.cycle, length)  # type: ignore[method-assign, assignment]
        self.headers = []  # the request has its own list; trailer fields are appended here and ignored

    @property
    def _web_defaults(self) -> list[tuple[bytes, bytes]]:
        return [header for header in self.cycle.default_headers if header[0] == b"date"]

    def _check_head(self, fields: Mapping[bytes, bytes]) -> None:
        """Raises _Rejected if the head is too large or violates HTTP."""
        if self._max_head_bytes > MAX_HEAD_BYTES and head_rules.size(self.url, self.headers) > MAX_HEAD_BYTES:
            raise _Rejected(_TOO_LARGE)
        violation = head_rules.find_violation(self.parser.get_http_version(), self.url, self.headers, fields)
        if violation is not None:
            raise _Rejected(_bad_request(400, violation))

    def on_body(self, body: bytes) -> None:
        self._enter_phase(_BODY)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._wants_upgrade:
            return
        self._enter_phase(_BETWEEN)
        super().on_message_complete()

    def _enter_phase(self, phase: _Phase) -> None:
        self._phase = phase
        self._made_progress = True
        self._head_bytes = 0

    def count_received(self, count: int) -> None:
        """Count bytes of a body that is read past the parser."""
        self._received += count

    def body_received(self) -> None:
        """End a body that was read past the parser. The old parser still waits for it, so create a new one."""
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def has_stalled(self, now: float) -> bool:
        """True if the rest of a request, or the first byte of the first one, is overdue. `now` is the loop's time."""
        is_paused = self.flow.read_paused
        if self._phase is _HEAD:
            if is_paused:
                self._head_since = now
            return now - self._head_since > HEAD_S
        if self._phase is _BETWEEN:  # uvicorn limits the time between two requests
            return self.cycle is None and now - self._connected_at > FIRST_BYTE_S
        is_answered = self._phase is _CLOSING or self.cycle.response_complete
        if is_answered and self._discarding.is_over(self.cycle, self._received, now):
            return True
        return self._pace.is_too_slow(self.cycle, self._received, now, is_paused=is_paused)

    def disconnect(self) -> None:
        """Close the connection at once, without reading the rest of the request."""
        transport: Any = self.transport
        transport.close_now()

    def has_stopped_reading(self, now: float) -> bool:
        """True if the client has read nothing of the buffered output for a minute."""
        in_process = self.transport.get_write_buffer_size()
        return self._unread_output.is_stalled(in_process, self._bytes_in_kernel() if in_process else 0, now)

    def awaits_confirmation(self) -> bool:
        """True if the connection is closed and its client had received everything at the previous call too.

        A client of TLS should confirm the end. Many do so only when they need the connection again. One call is not
        enough: under TLS there is a buffer that the transport does not count, and its turn comes between the calls.
        """
        transport: Any = self.transport
        was_delivered = self._is_delivered
        self._is_delivered = (
            transport.is_closed and not transport.get_write_buffer_size() and not self._bytes_in_kernel()
        )
        return was_delivered and self._is_delivered

    def _bytes_in_kernel(self) -> int:
        return _bytes_in_kernel(self.transport.get_extra_info("socket").fileno())

    def _reject(self, response: bytes) -> None:
        response_started = bool(self.pipeline)  # with pipelined requests, `cycle` is not the request that runs
        if self.cycle is not None and not self.cycle.response_complete:
            response_started = response_started or self.cycle.response_started
            self.cycle.disconnected = True  # the response of an earlier request can no longer be sent
            self.cycle.message_event.set()
        if not response_started:
            self.transport.write(response)
        self._phase = _HEAD  # the client may still be sending
        self.transport.close()

    def _discard(self) -> bool:
        """Switch to reading and discarding, unless the request is complete. True if it switched."""
        if self._phase is _BETWEEN or self._shutting_down:
            return False
        self._phase = _CLOSING
        self.pipeline.clear()
        self.flow.resume_reading()
        return True


def _close_unless_continued(cycle: Any) -> None:
    """Close the connection after a response that is sent before "100 Continue".

    The client may or may not send the body then, so the start of the next request is unknown.
    """
    receive, keep_alive = cycle.receive, cycle.keep_alive

    async def receive_body() -> MutableMapping[str, Any]:
        cycle.keep_alive = keep_alive
        message: MutableMapping[str, Any] = await receive()
        return message

    cycle.keep_alive = False
    cycle.receive = receive_body


def _bytes_in_kernel(descriptor: int) -> int:
    """Return the bytes in a socket's send buffer that the peer has not acknowledged; 0 if the kernel cannot report it.

    It may be megabytes, so a slow reader may need minutes before the socket accepts more.
    """
    try:
        unsent = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # a socket that is being closed has no file descriptor
        return 0
    return int(struct.unpack("i", unsent)[0])


def sweep(connections: Iterable[Any], now: float) -> int:
    """Disconnect clients that are too slow. Return the number of connections that ended."""
    count = 0
    for connection in connections:
        if not isinstance(connection, GuardedProtocol):
            continue
        if connection.has_stopped_reading(now) or connection.awaits_confirmation():
            connection.transport.abort()  # closing would wait for the client
        elif connection.has_stalled(now):
            connection.disconnect()
        else:
            continue
        count += 1
    return count
