"""Connection to the message bus, one Bus per process: publish, subscribe, request, and JetStream requests.

    bus = await Bus.connect(url, name="gateway")
    subscription = bus.subscribe("gpufn.v1.dmd.*", on_doorbell)
    response = await bus.request("gpufn.v1.node.a1", b"...")

Guarantees when the server fails:
- a publish either goes out on a live connection or raises BusUnavailable; the Bus does not buffer messages
- pending requests fail at once when the connection breaks
- the Bus reconnects forever, renews its subscriptions, then calls the `on_reconnect` callbacks
- an exception in a callback is logged and does not affect other callbacks
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gpufn_core.errors import BusUnavailable, PayloadTooLarge
from gpufn_platform.bus import jetstream, nats_protocol
from gpufn_platform.bus.jetstream import JetStreamError, NoResponders, NotStored, RequestTimeout, Stored
from gpufn_platform.bus.nats_protocol import Message
from gpufn_platform.bus.tcp_connection import Handler, Link, dial
from gpufn_platform.bus.tls import PUBLIC_AUTHORITIES, BusTls

__all__ = ["Bus", "JetStreamError", "Message", "NoResponders", "NotStored", "RequestTimeout", "Stored", "Subscription"]

log = logging.getLogger(__name__)

_PING_INTERVAL_S = 5.0
_FIRST_RECONNECT_S = 0.05
_LONGEST_RECONNECT_S = 0.5  # a loopback or LAN connect costs the server little; waiting delays calls
_STORE_RETRY_S = 0.1
_INBOX = "_INBOX."
PROCESSES = "from"  # part of the inboxes to which other processes respond, not the server


class Subscription:
    def __init__(self, bus: Bus, sid: bytes, subject: str, queue: str) -> None:
        self.subject = subject
        self.queue = queue
        self._bus = bus
        self._sid = sid

    def unsubscribe(self) -> None:
        """Stop receiving messages at once."""
        self._bus.unsubscribe(self._sid)

    def drain(self) -> None:
        """Stop receiving messages once all messages that the server has already sent have arrived."""
        self._bus.drain(self._sid)


class Bus:
    def __init__(self, url: str, name: str, ping_interval_s: float, tls: BusTls) -> None:
        self._servers = [server.strip() for server in url.split(",")]
        tls.check(self._servers)
        self._tls, self._tls_context = tls, tls.context(self._servers)
        self._name = name
        self._ping_interval_s = ping_interval_s
        self._link: Link | None = None
        self._disconnect_reason = "not connected yet"
        self._reconnecting: asyncio.Task[None] | None = None
        self._handlers: dict[bytes, Handler] = {}
        self._subscriptions: dict[bytes, Subscription] = {}
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._on_reconnect: dict[object, Callable[[], None]] = {}
        self._count = itertools.count(1)
        # The user is in the prefix so that a server's permissions can keep roles out of each other's inboxes. Only the
        # server responds to `_inbox`. A process that answers a request learns the other one, and cannot forge records.
        user = urlsplit(self._servers[0]).username or "any"
        self._inbox = f"{_INBOX}{user}.{secrets.token_hex(8)}"
        self._inbox_for_processes = f"{_INBOX}{user}.{PROCESSES}.{secrets.token_hex(8)}"

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        tls: BusTls = PUBLIC_AUTHORITIES,
        ping_interval_s: float = _PING_INTERVAL_S,
        retry_for_s: float = 0.0,
    ) -> Bus:
        """Connect to `url`: one server or several, separated by commas, each with its credentials.

        Raises BusUnavailable if no server accepts the connection within `retry_for_s`, and InvalidSetting for a server
        that `tls` does not allow. Later disconnects are repaired in the background.
        """
        bus = cls(url, name, ping_interval_s, tls)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + retry_for_s
        last_reason = ""
        while True:
            try:
                await bus._dial()
                break
            except BusUnavailable as error:
                if loop.time() >= deadline:
                    raise
                if last_reason != error.message:
                    last_reason = error.message
                    log.info("waiting for the bus: %s", last_reason)
            await asyncio.sleep(_jittered(_LONGEST_RECONNECT_S))
        for inbox in (bus._inbox, bus._inbox_for_processes):
            bus.subscribe(f"{inbox}.r.*", bus._on_response)
        return bus

    async def close(self) -> None:
        """Send everything that was published, then close. Pending requests fail."""
        self._disconnect_reason = "the bus was closed"
        link, self._link = self._link, None
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reconnecting
        if link is not None:
            link.close()
            await link.wait_closed()
        self._fail_waiting()

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def server_info(self) -> Mapping[str, Any]:
        """The server's INFO: version, max_payload, cluster, ..."""
        return self._live().info

    @property
    def certificate_ends_at(self) -> float | None:
        """When the certificate of the connected server ends, in unix seconds; None without TLS or connection."""
        return None if self._link is None else self._link.certificate_ends_at

    def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Queue a message; all messages of one loop iteration are sent in one write.

        Raises BusUnavailable when not connected, PayloadTooLarge above the server's limit.
        """
        link = self._live()
        if len(payload) > link.info.get("max_payload", 1 << 20):
            raise PayloadTooLarge(f"{subject}: {len(payload):,} bytes exceed the message size limit of the bus.")
        if link.congested:
            raise BusUnavailable("The message bus has stopped reading from the connection.")
        link.write(nats_protocol.pub(subject, reply, payload, headers))

    def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call `handler(message)` on the event loop for each message, in publish order.

        The handler must be quick. The subscription survives reconnects and may be made while disconnected.
        """
        sid = b"%d" % next(self._count)
        command = nats_protocol.sub(subject, queue, sid)
        subscription = Subscription(self, sid, subject, queue)
        self._handlers[sid] = handler
        self._subscriptions[sid] = subscription
        if self._link is not None:
            self._link.write(command)
        return subscription

    async def request(
        self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0
    ) -> Message:
        """Publish a request to another process and await one response.

        Raises NoResponders at once if the subject has no subscriber, RequestTimeout on timeout, BusUnavailable when the
        connection breaks.
        """
        return await self._request(self._inbox_for_processes, subject, payload, headers, timeout_s)

    async def request_server(
        self, subject: str, payload: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0
    ) -> Message:
        """Like `request`, for requests that the server itself answers: requests of JetStream, and messages for a
        stream."""
        return await self._request(self._inbox, subject, payload, headers, timeout_s)

    async def _request(
        self, inbox: str, subject: str, payload: bytes, headers: Mapping[str, str] | None, timeout_s: float
    ) -> Message:
        reply = f"{inbox}.r.{next(self._count)}"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Message] = loop.create_future()

        def on_timeout() -> None:
            if not future.done():
                future.set_exception(RequestTimeout(f"{subject} did not answer within {timeout_s:g} s."))

        self.publish(subject, payload, reply=reply, headers=headers)
        self._waiting[reply] = future
        timer = loop.call_later(timeout_s, on_timeout)  # half the cost of `asyncio.timeout`
        try:
            message = await future
        finally:
            timer.cancel()
            del self._waiting[reply]
        if message.status == 503:
            raise NoResponders(f"No subscriber on {subject}.")
        return message

    def new_inbox(self, *, for_processes: bool = False) -> str:
        """Return a unique subject for responses of the server, or of other processes; `<inbox>.*` is reserved for this
        Bus as well."""
        inbox = self._inbox_for_processes if for_processes else self._inbox
        return f"{inbox}.{next(self._count)}"

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Return once the server has processed all earlier publishes and subscriptions."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._live().ping()
        except TimeoutError:
            raise BusUnavailable(f"The message bus did not answer within {timeout_s:g} s.") from None

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after each reconnect, once subscriptions are renewed. Returns an unregister function."""
        key = object()
        self._on_reconnect[key] = callback

        def unregister() -> None:
            self._on_reconnect.pop(key, None)

        return unregister

    async def js(
        self, verb: str, body: dict[str, Any] | bytes | None = None, *, timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """Send a JetStream API request such as `js("STREAM.INFO.ORDERS")`. Raises JetStreamError if it is refused."""
        payload = body if isinstance(body, bytes) else msgspec.json.encode(body) if body is not None else b""
        response = await self.request_server(jetstream.API + verb, payload, timeout_s=timeout_s)
        return jetstream.read_response(response.payload, verb)

    async def js_or_none(
        self, verb: str, body: dict[str, Any] | None = None, *, codes: Container[int] = jetstream.NOT_FOUND
    ) -> dict[str, Any] | None:
        """Like `js`, but returns None if the request is refused with one of these NATS error codes."""
        try:
            return await self.js(verb, body)
        except JetStreamError as error:
            if error.err_code in codes:
                return None
            raise

    async def publish_stored(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expected_last: int | None = None,
        ttl_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> Stored:
        """Publish to a stream and wait for the acknowledgement that the message is stored. See
        `jetstream.store_headers`.

        Retries until `timeout_s` while no stream responds (a leader election, a restart). After an attempt with an
        unknown outcome (sent, then the connection broke) it retries only with a `msg_id`, which deduplicates.
        Raises QueueFull, Conflict, NotStored, BusUnavailable.
        """
        store = jetstream.store_headers(msg_id=msg_id, expected_last=expected_last, ttl_s=ttl_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            was_sent = self.connected
            remaining_s = max(0.05, deadline - loop.time())
            try:
                return await self._store(subject, payload, {**(headers or {}), **store}, remaining_s)
            except BusUnavailable as error:
                is_safe = msg_id is not None or isinstance(error, NoResponders) or not was_sent
                if not is_safe or loop.time() + _STORE_RETRY_S >= deadline:
                    raise
            await asyncio.sleep(_jittered(_STORE_RETRY_S))

    async def publish_batch(
        self, messages: Sequence[tuple[str, bytes]], *, expected_last: int, timeout_s: float = 10.0
    ) -> Stored:
        """Publish up to 1,000 messages to one stream as an atomic batch; returns where the last message is stored.

        The stream stores all messages consecutively, or none. `expected_last` applies to the last message's subject,
        see `store_headers`. There is no retry: if the outcome is unknown, look for the last message. Raises like
        `publish_stored`.
        """
        batch = f"{self._inbox[-16:]}.{next(self._count)}"
        count = len(messages)
        for position, (subject, payload) in enumerate(messages, 1):
            if position < count:
                self.publish(subject, payload, headers=jetstream.batch_headers(batch, position))
        commit = {"Nats-Batch-Commit": "1", **jetstream.store_headers(expected_last=expected_last)}
        headers = jetstream.batch_headers(batch, count) | commit
        return await self._store(subject, payload, headers, timeout_s)

    # internal

    async def _store(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Stored:
        try:
            response = await self.request_server(subject, payload, headers=headers, timeout_s=timeout_s)
        except RequestTimeout as error:
            raise NotStored(f"{error.message.rstrip('.')}: the disk of the message bus may be full.") from error
        return jetstream.read_pub_ack(response.payload, subject)

    def _live(self) -> Link:
        if self._link is None:
            raise BusUnavailable(f"Not connected to the message bus: {self._disconnect_reason}.")
        return self._link

    def _on_response(self, message: Message) -> None:
        future = self._waiting.get(message.subject)
        if future is not None and not future.done():
            future.set_result(message)

    def unsubscribe(self, sid: bytes) -> None:
        """Called by the Subscription, like `drain`."""
        if self._subscriptions.pop(sid, None) is not None and self._link is not None:
            self._link.write(nats_protocol.unsub(sid))
        self._handlers.pop(sid, None)

    def drain(self, sid: bytes) -> None:
        if self._subscriptions.pop(sid, None) is None:
            return
        if self._link is None:
            self._handlers.pop(sid, None)
            return
        self._link.write(nats_protocol.unsub(sid))

        def forget(pong: asyncio.Future[None]) -> None:
            pong.exception()
            self._handlers.pop(sid, None)

        self._link.ping().add_done_callback(forget)

    async def _dial(self) -> None:
        link = await dial(
            self._servers,
            name=self._name,
            handlers=self._handlers,
            on_lost=self._on_lost,
            ping_interval_s=self._ping_interval_s,
            tls=self._tls_context,
        )
        if link.is_lost:
            raise BusUnavailable("The message bus closed the connection at once.")
        self._link = link
        for sid, subscription in self._subscriptions.items():
            link.write(nats_protocol.sub(subscription.subject, subscription.queue, sid))

    def _on_lost(self, link: Link, reason: str) -> None:
        if link is not self._link:
            return
        log.warning("lost the message bus: %s", reason)
        self._link = None
        self._disconnect_reason = reason
        # A server in a cluster lists its peers; they are as good as the configured ones.
        scheme = urlsplit(self._servers[0]).scheme
        peers = [f"{scheme}://{peer}" for peer in link.info.get("connect_urls") or []]
        self._servers += [peer for peer in peers if peer not in self._servers and self._tls.allows(peer)]
        self._fail_waiting()
        self._reconnecting = asyncio.create_task(self._reconnect(), name="bus-reconnect")

    def _fail_waiting(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                reason = f"The connection to the message bus was lost: {self._disconnect_reason}."
                future.set_exception(BusUnavailable(reason))

    async def _reconnect(self) -> None:
        delay_s = _FIRST_RECONNECT_S
        while True:
            await asyncio.sleep(_jittered(delay_s))
            try:
                await self._dial()
                break
            except BusUnavailable as error:
                self._disconnect_reason = error.message.rstrip(".")
            delay_s = min(_LONGEST_RECONNECT_S, delay_s * 1.5)
        log.info("connected to the message bus again")
        for callback in list(self._on_reconnect.values()):
            try:
                callback()
            except Exception:
                log.exception("a callback failed after the reconnect")


def is_inbox(subject: str) -> bool:
    """Return whether `subject` is an inbox of a Bus and not part of a stream."""
    return subject.startswith(_INBOX)


def _jittered(delay_s: float) -> float:
    """Spread out reconnects: many processes lose the same server at the same instant."""
    return delay_s * random.uniform(0.5, 1.5)  # noqa: S311
