"""One TCP connection to one server, from the completed handshake until the connection is lost.

nats-py opens the connection (`dial`) and handles addresses, TLS and authentication. Then this protocol takes over the
socket, because nats-py's queue, task and future per message cost more than the message itself
(docs/decisions/0001-nats-client.md has the figures):

1. bytes arrive; each complete message goes straight to its subscription's handler, on the event loop
2. all commands written in one loop iteration, by handlers or other code, leave in one write
3. a ping every `ping_interval_s`; after two unanswered pings or any error the link is lost: `on_lost(reason)`, once

A lost link is never repaired: the Bus dials a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from gpufn_core.errors import BusUnavailable
from gpufn_platform.bus import nats_protocol
from gpufn_platform.bus.nats_protocol import Message
from gpufn_platform.bus.nats_py import Client, NatsError
from gpufn_platform.bus.tls import NOTICE_DAYS, days_left, ends_at, problem_of

log = logging.getLogger(__name__)

Handler = Callable[[Message], None]

_CONNECT_TIMEOUT_S = 2
_CLOSE_TIMEOUT_S = 1  # for the server's confirmation of the end of TLS
_MAX_PINGS_OUT = 2
# With more unsent bytes than this, publishers are refused: the server has stopped reading.
_MAX_UNSENT_BYTES = 64 << 20
_M, _H, _P, _I, _O, _PLUS, _MINUS = b"MHPIO+-"


class Link(asyncio.Protocol):
    def __init__(
        self,
        transport: asyncio.Transport,
        info: dict[str, Any],
        handlers: Mapping[bytes, Handler],
        on_lost: Callable[[Link, str], None],
        ping_interval_s: float,
    ) -> None:
        self.info = info
        self.congested = False
        self.opener: Client | None = None  # keeps the client alive: its StreamWriter closes the socket when collected
        self._transport = transport
        self._handlers = handlers
        self._on_lost: Callable[[Link, str], None] | None = on_lost
        self._loop = asyncio.get_running_loop()
        self._out: list[bytes] = []
        self._flush_is_due = False
        self._rest = bytearray()  # an incomplete message
        self._needed = 0  # length of the incomplete message, if known
        self._pings: list[asyncio.Future[None] | None] = []  # None: a ping of the timer
        self._error = ""
        self._ended = asyncio.Event()
        self._interval_s = ping_interval_s
        self._timer = self._loop.call_later(ping_interval_s, self._ping_on_timer)
        transport.set_write_buffer_limits(high=_MAX_UNSENT_BYTES)

    @property
    def is_lost(self) -> bool:
        return self._on_lost is None

    @property
    def certificate_ends_at(self) -> float | None:
        """When the server's certificate ends, in unix seconds; None without TLS."""
        peer = self._transport.get_extra_info("ssl_object")
        return ends_at(peer.getpeercert()) if peer is not None else None

    def write(self, command: bytes) -> None:
        self._out.append(command)
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def ping(self) -> asyncio.Future[None]:
        """Return a future that completes once the server has processed everything written before."""
        future = self._loop.create_future()
        self._pings.append(future)
        self.write(nats_protocol.PING)
        return future

    def close(self) -> None:
        """Send pending writes, then close; `on_lost` is not called."""
        self._on_lost = None
        self._flush()
        self._on_ended("closed")
        self._transport.close()

    async def wait_closed(self) -> None:
        """Wait for the end of a closed connection: one loop iteration, or with TLS until the server confirms it."""
        if self._transport.get_extra_info("ssl_object") is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._ended.wait()
            self._transport.abort()
        await asyncio.sleep(0)

    def lose(self, reason: str) -> None:
        """Abort the connection at once."""
        self._transport.abort()
        self._on_ended(reason)

    # asyncio.Protocol

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()
        self._on_ended(self._error or (str(exc) if exc else "the server closed the connection"))

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
            self._rest.clear()
        self._flush_is_due = True  # so that the handlers' writes are sent in one piece, below
        try:
            consumed = self._dispatch(data)
        except (ValueError, IndexError) as error:
            self.lose(f"cannot read what the server sent: {error}")
            return
        finally:
            self._flush()
        if consumed < len(data):
            self._rest += data[consumed:]

    def _dispatch(self, data: bytes) -> int:
        """Handle each complete message in `data`; returns the number of bytes consumed."""
        position, end, self._needed = 0, len(data), 0
        handlers = self._handlers
        while (line_end := data.find(b"\r\n", position)) >= 0:
            op = data[position]
            if op not in (_M, _H):
                self._control(data[position:line_end])
                position = line_end + 2
                continue
            # MSG subject sid [reply] size    HMSG subject sid [reply] header-size size
            words = data[position:line_end].split()
            has_headers = words[0] == b"HMSG"
            if not has_headers and words[0] != b"MSG":
                raise ValueError(f"unknown command {words[0]!r}")
            start = line_end + 2
            stop = start + int(words[-1])
            if stop + 2 > end:
                self._needed = stop + 2 - position
                break
            position = stop + 2
            handler = handlers.get(words[2])
            if handler is None:
                continue
            try:
                if not has_headers:
                    reply = words[3].decode() if len(words) == 5 else ""
                    handler(Message(words[1].decode(), reply, data[start:stop]))
                else:
                    reply = words[3].decode() if len(words) == 6 else ""
                    body = start + int(words[-2])
                    headers, status, description = nats_protocol.parse_headers(data[start:body])
                    handler(Message(words[1].decode(), reply, data[body:stop], headers, status, description))
            except Exception:
                log.exception("a handler of %s failed", words[1].decode())
        return position

    def _control(self, line: bytes) -> None:
        op = line[0]
        if op == _P and line[1] == _I:
            self.write(nats_protocol.PONG)
        elif op == _P and line[1] == _O:
            waiter = self._pings.pop(0) if self._pings else None
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        elif op == _MINUS:
            self._error = line[4:].strip().strip(b"'").decode()
            # A permissions violation concerns one command; after any other error the server closes the connection.
            log.warning("the bus reported an error: %s", self._error)
        elif op == _I:
            self.info |= json.loads(line[5:])
        elif op != _PLUS:
            raise ValueError(f"unknown command {line[:20]!r}")

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            self._transport.write(data)

    def _ping_on_timer(self) -> None:
        if sum(ping is None for ping in self._pings) >= _MAX_PINGS_OUT:
            self.lose("the server does not answer pings")
            return
        self._pings.append(None)
        self.write(nats_protocol.PING)
        self._timer = self._loop.call_later(self._interval_s, self._ping_on_timer)

    def _on_ended(self, reason: str) -> None:
        self._timer.cancel()
        for waiter in self._pings:
            if waiter is not None and not waiter.done():
                waiter.set_exception(BusUnavailable(f"The connection to the message bus was lost: {reason}."))
        self._pings.clear()
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(self, reason)


class _Client(Client):
    """Sends the password of a URL with the scheme tls over TLS only.

    nats-py speaks TLS if the server's INFO requires it. INFO arrives in plain text, so a machine on the way can change
    it, and then receives the password.
    """

    def _connect_command(self) -> bytes:
        server, writer = cast("Any", self)._current_server, cast("Any", self)._transport._io_writer
        if server.uri.scheme == "tls" and writer.get_extra_info("ssl_object") is None:
            raise NatsError("it does not speak TLS; no password was sent")
        return cast("bytes", cast("Any", super())._connect_command())


async def dial(
    servers: list[str],
    *,
    name: str,
    handlers: Mapping[bytes, Handler],
    on_lost: Callable[[Link, str], None],
    ping_interval_s: float,
    tls: ssl.SSLContext | None = None,
) -> Link:
    """Connect to the first of `servers` that accepts us. `tls` verifies servers that speak TLS.

    Raises BusUnavailable with the last server's reason.
    """
    reasons: list[Exception] = []

    async def record_error(error: Exception) -> None:
        reasons.append(error)

    url = urlsplit(servers[0])
    client = _Client()
    try:
        await client.connect(
            servers=servers,
            name=name,
            user=unquote(url.username) if url.username else None,
            password=unquote(url.password) if url.password else None,
            error_cb=record_error,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=_CONNECT_TIMEOUT_S,
            tls=tls,
        )
    except (OSError, NatsError, TimeoutError, asyncio.CancelledError) as error:
        _abandon(client)
        if isinstance(error, asyncio.CancelledError):
            raise
        reason = _reason(reasons[-1] if reasons else error)
        where = f"{url.hostname}:{url.port or 4222}"
        raise BusUnavailable(f"Cannot connect to the message bus at {where}: {reason}.") from error
    return _take_over(client, handlers, on_lost, ping_interval_s)


def _abandon(client: Client) -> None:
    """Drop a failed connection. After a failed TLS handshake, nats-py's `close` never returns (nats.py issue 718)."""
    internals = cast("Any", client)
    for task in (internals._reading_task, internals._ping_interval_task, internals._flusher_task):
        if task is not None:
            task.cancel()
    if internals._transport is not None and (writer := internals._transport._io_writer) is not None:
        writer.transport.abort()


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLError):
        return problem_of(error)
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        # The reset overtook the server's error message.
        return "the server closed the connection during the handshake (wrong user or password?)"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error).removeprefix("nats: ").strip("'") or "no answer"


def _take_over(
    client: Client, handlers: Mapping[bytes, Handler], on_lost: Callable[[Link, str], None], ping_interval_s: float
) -> Link:
    """Move nats-py's connected socket to a Link. There is no await in here, so no bytes are lost.

    gpufn uses no private names of nats-py except these and the names in `_Client` and `_abandon`.
    tests/platform/bus/test_tcp_connection.py and test_tls.py detect changes to them.
    """
    internals = cast("Any", client)
    transport: asyncio.Transport = internals._transport._io_writer.transport
    link = Link(transport, dict(internals._server_info), handlers, on_lost, ping_interval_s)
    transport.set_protocol(link)
    for task in (internals._reading_task, internals._ping_interval_task, internals._flusher_task):
        task.cancel()
    link.opener = client
    _report_expiry(transport)
    if unread := bytes(internals._transport._io_reader._buffer):
        link.data_received(unread)
    return link


def _report_expiry(transport: asyncio.Transport) -> None:
    peer = transport.get_extra_info("ssl_object")
    days = days_left(peer.getpeercert(), time.time()) if peer is not None else None
    if days is not None and days < NOTICE_DAYS:
        log.warning("the certificate of the bus ends in %.0f days: renew it", days)
