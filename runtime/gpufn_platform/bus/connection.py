"""One Bus per process: publish, subscribe, request, and JetStream's requests.

    bus = await Bus.connect(url, name="gateway")
    subscription = bus.subscribe("gpufn.v1.dmd.*", on_doorbell)
    answer = await bus.request("gpufn.v1.node.a1", b"...")

What holds whatever happens to the server:
- a publish either goes out on a live connection or raises BusUnavailable: nothing is kept for later
- a request that waits when the connection breaks fails at once
- the Bus reconnects for ever, subscribes again, then tells `on_reconnect`'s callbacks
- a callback that raises is logged and hurts nobody else
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gpufn_core.errors import BusUnavailable, PayloadTooLarge
from gpufn_platform.bus import jetstream, nats_protocol
from gpufn_platform.bus.jetstream import JetStreamError, NoResponders, NotStored, Stored, Unanswered
from gpufn_platform.bus.nats_protocol import Message
from gpufn_platform.bus.tcp_connection import Handler, Link, dial

__all__ = ["Bus", "JetStreamError", "Message", "NoResponders", "NotStored", "Stored", "Subscription", "Unanswered"]

log = logging.getLogger(__name__)

_PING_INTERVAL_S = 5.0
_FIRST_RECONNECT_S = 0.05
_LONGEST_RECONNECT_S = 0.5  # a loopback or LAN connect costs the server little; waiting costs us calls
_STORE_RETRY_S = 0.1
_INBOX = "_INBOX."


class Subscription:
    def __init__(self, bus: Bus, sid: bytes, subject: str, queue: str) -> None:
        self.subject = subject
        self.queue = queue
        self._bus = bus
        self._sid = sid

    def unsubscribe(self) -> None:
        """Hear nothing more, at once."""
        self._bus.unsubscribe(self._sid)

    def drain(self) -> None:
        """Hear only what the server had sent before it learned of this."""
        self._bus.drain(self._sid)


class Bus:
    def __init__(self, url: str, name: str, ping_interval_s: float) -> None:
        self._servers = [server.strip() for server in url.split(",")]
        self._name = name
        self._ping_interval_s = ping_interval_s
        self._link: Link | None = None
        self._why_not = "not connected yet"
        self._reconnecting: asyncio.Task[None] | None = None
        self._handlers: dict[bytes, Handler] = {}
        self._subscriptions: dict[bytes, Subscription] = {}
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._on_reconnect: dict[object, Callable[[], None]] = {}
        self._count = itertools.count(1)
        # The user is in the prefix so that a server's permissions can keep roles out of each other's inboxes.
        user = urlsplit(self._servers[0]).username or "any"
        self._inbox = f"{_INBOX}{user}.{secrets.token_hex(8)}"

    @classmethod
    async def connect(
        cls, url: str, *, name: str, ping_interval_s: float = _PING_INTERVAL_S, patience_s: float = 0.0
    ) -> Bus:
        """`url`: one server or several, separated by commas, each with its credentials.

        Raises BusUnavailable when no server answers for `patience_s`; later losses are mended in the background.
        """
        bus = cls(url, name, ping_interval_s)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + patience_s
        said = ""
        while True:
            try:
                await bus._dial()
                break
            except BusUnavailable as error:
                if loop.time() >= give_up:
                    raise
                if said != error.message:
                    said = error.message
                    log.info("waiting for the bus: %s", said)
            await asyncio.sleep(_jittered(_LONGEST_RECONNECT_S))
        bus.subscribe(f"{bus._inbox}.r.*", bus._on_answer)
        return bus

    async def close(self) -> None:
        """Send what was published, then close. Waiting requests fail."""
        self._why_not = "the bus was closed"
        link, self._link = self._link, None
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reconnecting
        if link is not None:
            link.close()
            await asyncio.sleep(0)  # the transport reports its end in the loop's next turn
        self._fail_waiting()

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the server said about itself: version, max_payload, cluster ..."""
        return self._live().info

    def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send soon, together with whatever else is published in this turn of the loop.

        Raises BusUnavailable when not connected, PayloadTooLarge above the server's limit.
        """
        link = self._live()
        if len(payload) > link.info.get("max_payload", 1 << 20):
            raise PayloadTooLarge(f"{subject}: {len(payload):,} bytes are more than the message bus takes.")
        if link.congested:
            raise BusUnavailable("The message bus has stopped reading what is sent to it.")
        link.write(nats_protocol.pub(subject, reply, payload, headers))

    def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Call `handler(message)` on the loop for each message; in the same order as they were published.

        It must be quick. Holds across reconnects; may be called while disconnected.
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
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> Message:
        """Publish and await one answer.

        Raises NoResponders at once when nobody listens, Unanswered on timeout, BusUnavailable when the connection
        breaks.
        """
        reply = f"{self._inbox}.r.{next(self._count)}"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Message] = loop.create_future()

        def give_up() -> None:
            if not future.done():
                future.set_exception(Unanswered(f"{subject} did not answer within {timeout_s:g} s."))

        self.publish(subject, payload, reply=reply, headers=headers)
        self._waiting[reply] = future
        timer = loop.call_later(timeout_s, give_up)  # half of what `asyncio.timeout` costs
        try:
            message = await future
        finally:
            timer.cancel()
            del self._waiting[reply]
        if message.status == 503:
            raise NoResponders(f"Nobody listens on {subject}.")
        return message

    def new_inbox(self) -> str:
        """A subject nobody else listens on; `<it>.*` is ours as well."""
        return f"{self._inbox}.{next(self._count)}"

    async def flush(self, timeout_s: float = 5.0) -> None:
        """Return once the server has processed all that was published and subscribed before."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._live().ping()
        except TimeoutError:
            raise BusUnavailable(f"The message bus did not answer within {timeout_s:g} s.") from None

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback()` after each reconnect, subscriptions already renewed. Returns what un-registers it."""
        key = object()
        self._on_reconnect[key] = callback

        def unregister() -> None:
            self._on_reconnect.pop(key, None)

        return unregister

    async def js(
        self, verb: str, body: dict[str, Any] | bytes | None = None, *, timeout_s: float = 5.0
    ) -> dict[str, Any]:
        """A request to JetStream's API, such as `js("STREAM.INFO.ORDERS")`. Raises JetStreamError when refused."""
        payload = body if isinstance(body, bytes) else msgspec.json.encode(body) if body is not None else b""
        answer = await self.request(jetstream.API + verb, payload, timeout_s=timeout_s)
        return jetstream.read_answer(answer.payload, verb)

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
        """Publish to a stream and await its word that the message is stored. See `jetstream.store_headers`.

        Until `timeout_s` it tries again while no stream answers (a leader election, a restart); after an attempt whose
        fate is unknown (sent, then the connection broke) only with a `msg_id`, which keeps the second from counting.
        Raises QueueFull, Conflict, NotStored, BusUnavailable.
        """
        store = jetstream.store_headers(msg_id=msg_id, expected_last=expected_last, ttl_s=ttl_s)
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout_s
        while True:
            was_sent = self.connected
            left_s = max(0.05, give_up - loop.time())
            try:
                return await self._store(subject, payload, {**(headers or {}), **store}, left_s)
            except BusUnavailable as error:
                is_safe = msg_id is not None or isinstance(error, NoResponders) or not was_sent
                if not is_safe or loop.time() + _STORE_RETRY_S >= give_up:
                    raise
            await asyncio.sleep(_jittered(_STORE_RETRY_S))

    async def publish_batch(
        self, messages: Sequence[tuple[str, bytes]], *, expected_last: int, timeout_s: float = 10.0
    ) -> Stored:
        """Publish up to 1,000 messages to one stream, which stores all, one after the other, or none; returns where the
        last is. `expected_last` is of the last message's subject, see `store_headers`.

        Tried once: who does not learn its fate finds it by the last message. Raises as `publish_stored`.
        """
        batch = f"{self._inbox[-16:]}.{next(self._count)}"
        count = len(messages)
        for place, (subject, payload) in enumerate(messages, 1):
            if place < count:
                self.publish(subject, payload, headers=jetstream.batch_headers(batch, place))
        headers = jetstream.batch_headers(batch, count) | jetstream.commit_headers(expected_last)
        return await self._store(subject, payload, headers, timeout_s)

    # inside

    async def _store(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Stored:
        try:
            answer = await self.request(subject, payload, headers=headers, timeout_s=timeout_s)
        except Unanswered as error:
            raise NotStored(f"{error.message.rstrip('.')}: the disk of the message bus may be full.") from error
        return jetstream.read_pub_ack(answer.payload, subject)

    def _live(self) -> Link:
        if self._link is None:
            raise BusUnavailable(f"Not connected to the message bus: {self._why_not}.")
        return self._link

    def _on_answer(self, message: Message) -> None:
        future = self._waiting.get(message.subject)
        if future is not None and not future.done():
            future.set_result(message)

    def unsubscribe(self, sid: bytes) -> None:
        """For its Subscription, as `drain`: nobody else has its number."""
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
        )
        if link.is_lost:
            raise BusUnavailable("The message bus hung up at once.")
        self._link = link
        for sid, subscription in self._subscriptions.items():
            link.write(nats_protocol.sub(subscription.subject, subscription.queue, sid))

    def _on_lost(self, link: Link, why: str) -> None:
        if link is not self._link:
            return
        log.warning("lost the message bus: %s", why)
        self._link = None
        self._why_not = why
        # A cluster's server names its peers; they are as good as the configured ones.
        peers = [f"nats://{peer}" for peer in link.info.get("connect_urls") or []]
        self._servers += [peer for peer in peers if peer not in self._servers]
        self._fail_waiting()
        self._reconnecting = asyncio.create_task(self._reconnect(), name="bus-reconnect")

    def _fail_waiting(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(BusUnavailable(f"The connection to the message bus was lost: {self._why_not}."))

    async def _reconnect(self) -> None:
        delay_s = _FIRST_RECONNECT_S
        while True:
            await asyncio.sleep(_jittered(delay_s))
            try:
                await self._dial()
                break
            except BusUnavailable as error:
                self._why_not = error.message.rstrip(".")
            delay_s = min(_LONGEST_RECONNECT_S, delay_s * 1.5)
        log.info("connected to the message bus again")
        for callback in list(self._on_reconnect.values()):
            try:
                callback()
            except Exception:
                log.exception("a callback failed after the reconnect")


def is_inbox(subject: str) -> bool:
    """Whether an answer to `subject` reaches a process of ours, and no stream."""
    return subject.startswith(_INBOX)


def _jittered(delay_s: float) -> float:
    """Many processes lose the same server at the same instant; they should not all come back at one."""
    return delay_s * random.uniform(0.5, 1.5)  # noqa: S311
