"""Ordered, read-only access to a stream: the common part of logs and key-value watches.

A Feed is one short-lived consumer on the server and is never repaired. A gap, a refusal, silence or a reconnect ends it
with one call of `on_lost(reason)`, and its owner opens another Feed at the same position.

In a cluster the consumer may be on a node that has just come back and has not caught up. That node shows the past:
records would seem to have vanished. So the Feed first requests the newest sequence from the stream's leader. Also, the
route to that node may become known slightly later than its consumer exists, so a first request without responders is
retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from gpufn_core.errors import BusUnavailable
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus, JetStreamError, Message, Subscription
from gpufn_platform.bus.nats_protocol import ack_tokens

log = logging.getLogger(__name__)

# Messages requested ahead of those the reader has taken: _FIRST_WINDOW until their size is known, then _WINDOW_BYTES
# worth of messages, within bounds.
_FIRST_WINDOW = 64
_WINDOW_BYTES = 16 << 20
_MIN_WINDOW, _MAX_WINDOW = 4, 512
_EXPIRES_S = 30
_HEARTBEAT_S = 5
_NANO = 1_000_000_000
_REOPEN_S = 0.05
_CATCH_UP_S = 2.0
_ROUTE_TIMEOUT_S = 2.0
_CHECKS, _CHECK_S = 10, 0.05  # checks of the newest sequence: other clients may write all the time, and it may expire


class StoredMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    payload: bytes
    headers: dict[str, str]
    time: float  # seconds since the epoch, by the server's clock


_OnMessage = Callable[[StoredMessage, int], None]


class Feed:
    def __init__(
        self,
        bus: Bus,
        stream: str,
        filter_subject: str,
        on_message: _OnMessage,
        *,
        waits: bool,
        before_seq: int | None = None,
    ) -> None:
        self.pending = 0
        self._before_seq = before_seq
        self._waits = waits
        self._bus = bus
        self._stream = stream
        self._name = f"feed-{secrets.token_hex(8)}"
        self._on_message = on_message
        self._on_lost: Callable[[str], None] | None = None  # set while the feed is open
        self._on_exhausted: Callable[[], None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._has_all = False  # everything that is readable was delivered
        self._filter = filter_subject
        self._progress = asyncio.Event()
        self._requested = 0
        self._unprocessed = 0
        self._window = _FIRST_WINDOW
        self._mean_bytes = 0.0
        self._consumer_seq = 0
        self._seq = 0
        self._newest_seq = 0  # the leader's newest sequence when the feed opened; 0: none, or a single server
        self._is_alive = True
        self._has_route = False  # the consumer has responded
        self._route_deadline = asyncio.get_running_loop().time() + _ROUTE_TIMEOUT_S
        self._progress_at = asyncio.get_running_loop().time()  # when the last message arrived, or the feed opened
        self._inbox = bus.new_inbox()
        self._subscription: Subscription | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._behind_timer: asyncio.TimerHandle | None = None
        self._request_timer: asyncio.TimerHandle | None = None
        self._unregister_reconnect: Callable[[], None] | None = None

    @classmethod
    async def open(
        cls,
        bus: Bus,
        stream: str,
        filter_subject: str,
        on_message: _OnMessage,
        on_lost: Callable[[str], None],
        *,
        since_seq: int | None = None,
        before_seq: int | None = None,
        headers_only: bool = False,
        on_exhausted: Callable[[], None] | None = None,
        waits: bool = True,
    ) -> Feed:
        """Read from `since_seq` on; without it, the newest message of each subject and then new messages.

        `before_seq`: the reader needs no messages from there on, but may receive some. `headers_only`: without
        payloads. `waits` False: the reader needs only stored messages, and detects at once that messages were removed
        meanwhile; a Feed that waits detects it at a heartbeat.

        After `on_message(message, pending)` the reader must call `take()` once it has processed the message. `pending`:
        how many messages are known to follow, also available on the Feed. If these messages will not arrive, because
        they were removed meanwhile or are damaged on the server's disk, `on_exhausted` is called once. Without that
        callback the Feed is lost, since there is no other signal. Raises BusUnavailable, JetStreamError; `on_lost` is
        only called after the Feed was open.
        """
        feed = cls(bus, stream, filter_subject, on_message, waits=waits, before_seq=before_seq)
        feed._on_exhausted = on_exhausted
        await feed._open(on_lost, since_seq, headers_only=headers_only)
        return feed

    async def _open(self, on_lost: Callable[[str], None], since_seq: int | None, *, headers_only: bool) -> None:
        config: dict[str, Any] = {
            "name": self._name,
            "filter_subject": self._filter,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": 30 * _NANO,
            "headers_only": headers_only,
        }
        if since_seq is None:
            config["deliver_policy"] = "last_per_subject"
        else:
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, since_seq)}
            self._seq = max(1, since_seq) - 1
        if self._bus.server_info.get("cluster"):
            newest_seq = await last_seq(self._bus, self._stream, self._filter)
            self._newest_seq = newest_seq if newest_seq >= (since_seq or 0) else 0
        info = await self._bus.js(
            f"CONSUMER.CREATE.{self._stream}.{self._name}.{self._filter}",
            {"stream_name": self._stream, "config": config, "action": "create"},
        )
        self.pending = self._still_pending(int(info["num_pending"]))
        self._subscription = self._bus.subscribe(self._inbox, self._on_delivery)
        self._unregister_reconnect = self._bus.on_reconnect(lambda: self._lost("reconnected"))
        self._check_heartbeat()
        if self._waits or self.pending:
            self._request()
        if not self.is_open:
            raise BusUnavailable(f"Reading {self._stream} was interrupted at the start.")
        self._on_lost = on_lost
        if self._newest_seq:
            self._behind_timer = asyncio.get_running_loop().call_later(_CATCH_UP_S, self._check_caught_up)

    @property
    def is_open(self) -> bool:
        return self._subscription is not None

    async def catch_up(self) -> None:
        """Return once the newest stored message has been delivered.

        A message that is rewritten while the newest message of each subject is read arrives after the others, when
        nothing seems to be pending. Raises BusUnavailable if the Feed is lost before."""
        for _ in range(_CHECKS):
            newest_seq = await last_seq(self._bus, self._stream, self._filter)
            if not self.is_open:
                raise BusUnavailable(f"Reading {self._stream} was interrupted.")
            if self._seq >= newest_seq:
                return
            if not self._waits:
                self._request()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_S):
                    while self._seq < newest_seq:
                        self._progress.clear()
                        await self._progress.wait()

    def take(self) -> None:
        """Report that the reader has processed one more message."""
        self._unprocessed -= 1
        # The server refuses a no_wait request when earlier requests already cover everything pending.
        may_request = self._waits or self.pending > self._requested
        if may_request and self._requested + self._unprocessed <= self._window // 2:
            self._request()

    def close(self) -> None:
        self._on_lost = None
        for timer in (self._timer, self._behind_timer, self._request_timer):
            if timer is not None:
                timer.cancel()
        if self._checking is not None:
            self._checking.cancel()
        if self._unregister_reconnect is not None:
            self._unregister_reconnect()
        if self._subscription is not None:
            self._subscription.unsubscribe()
            self._subscription = None
            # Not awaited: if this is lost, the server removes the consumer after its inactive_threshold.
            with contextlib.suppress(BusUnavailable):
                self._bus.publish(f"{jetstream.API}CONSUMER.DELETE.{self._stream}.{self._name}", b"")

    def _request(self) -> None:
        batch = self._window - self._requested - self._unprocessed
        if self._before_seq is not None:  # further messages would be sent in vain
            batch = min(batch, max(self._before_seq - 1 - self._seq, 1) - self._requested)
        if batch <= 0:
            return
        body: dict[str, Any] = {"batch": batch, "no_wait": True}
        if self._waits:
            body = {"batch": batch, "expires": _EXPIRES_S * _NANO, "idle_heartbeat": _HEARTBEAT_S * _NANO}
        subject = f"{jetstream.API}CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        try:
            self._bus.publish(subject, msgspec.json.encode(body), reply=self._inbox)
        except BusUnavailable as error:
            self._lost(error.message)
        else:
            self._requested += batch

    def _check_heartbeat(self) -> None:
        if not self._is_alive and self._requested:
            self._lost("no heartbeat")
            return
        self._is_alive = False
        self._timer = asyncio.get_running_loop().call_later(2.2 * _HEARTBEAT_S, self._check_heartbeat)

    def _still_pending(self, pending: int) -> int:
        """Correct `pending`, which only reflects the consumer's node."""
        if self._has_all:  # the server counts damaged messages forever
            return 0
        return pending or int(self._seq < self._newest_seq)

    def _check_caught_up(self) -> None:
        """Lose a feed whose node is still behind. If the newest message was removed, there is another newest one."""
        if self._still_pending(0) and not self._unprocessed:
            self._lost("the consumer's node is behind")

    def _on_delivery(self, message: Message) -> None:
        self._is_alive = True
        loop = asyncio.get_running_loop()
        if message.status == 503 and not self._has_route and loop.time() < self._route_deadline:
            self._requested = 0
            self._request_timer = loop.call_later(_REOPEN_S, self._request)
            return
        self._has_route = True
        if not self._waits and message.status in (404, 408):  # all requests have ended: nothing more is available
            self._requested = 0
            if self.pending:
                self._start_check()
        elif message.status == 408:
            self._requested -= int((message.headers or {}).get("Nats-Pending-Messages", self._requested))
            self._request()
        elif message.status == 100:  # the server sends a heartbeat when it has nothing to deliver
            if self.pending and self._on_exhausted is None:
                self._lost("pending messages were removed")
            elif self.pending:
                self._start_check()
        elif message.status:
            self._lost(f"{message.status} {message.description}")
        else:
            _, seq, consumer_seq, time, pending = ack_tokens(message.reply)
            self._consumer_seq += 1
            if consumer_seq != self._consumer_seq:
                self._lost(f"a gap before sequence {seq}")
                return
            self._requested -= 1
            self._unprocessed += 1
            self._adapt_window(len(message.payload))
            self._seq, self._progress_at = seq, loop.time()
            stored = StoredMessage(message.subject, seq, message.payload, message.headers or {}, time)
            self.pending = self._still_pending(pending)
            self._on_message(stored, self.pending)
            self._progress.set()

    def _start_check(self) -> None:
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name=f"{self._name}-check")

    async def _check(self) -> None:
        """Check with the stream's leader whether there are readable messages after the last delivered one."""
        consumer_seq, is_readable = self._consumer_seq, True
        body = {"next_by_subj": self._filter, "seq": self._seq + 1}
        with contextlib.suppress(BusUnavailable, JetStreamError):
            is_readable = await self._bus.js_or_none(f"STREAM.MSG.GET.{self._stream}", body) is not None
        if self._consumer_seq != consumer_seq:
            return  # more arrived; the next heartbeat checks again
        loop = asyncio.get_running_loop()
        if is_readable and not self._waits and loop.time() < self._progress_at + _CATCH_UP_S:  # its node is behind
            self._request_timer = loop.call_later(_REOPEN_S, self._request)
            return
        if is_readable or self._on_exhausted is None:
            self._lost("pending messages were removed")
            return
        self._has_all, self.pending = True, 0
        self._on_exhausted()

    def _adapt_window(self, size: int) -> None:
        """Adapt the window to the size of another message."""
        self._mean_bytes += (size - self._mean_bytes) / min(self._consumer_seq, _FIRST_WINDOW)
        if self._consumer_seq >= _MIN_WINDOW:
            fits = int(_WINDOW_BYTES / max(1.0, self._mean_bytes))
            self._window = min(max(fits, _MIN_WINDOW), _MAX_WINDOW)

    def _lost(self, reason: str) -> None:
        on_lost = self._on_lost
        self.close()
        if on_lost is not None:
            on_lost(reason)


async def last_seq(bus: Bus, stream: str, filter_subject: str) -> int:
    """Return the sequence of the newest message, according to the stream's leader; 0 if there is none."""
    query = {"last_by_subj": filter_subject}
    response = await bus.js_or_none(f"STREAM.MSG.GET.{stream}", query, codes=(jetstream.NO_MESSAGE,))
    return 0 if response is None else int(response["message"]["seq"])


async def reopen_pause() -> None:
    """Pause before reopening a lost Feed; with jitter, because a restart ends all feeds at the same time."""
    await asyncio.sleep(random.uniform(0, 2 * _REOPEN_S))  # noqa: S311


async def collect(
    bus: Bus,
    stream: str,
    filter_subject: str,
    *,
    since_seq: int | None = None,
    before_seq: int | None = None,
    headers_only: bool = False,
) -> list[StoredMessage]:
    """Return the messages that a Feed would deliver now, up to `before_seq` (exclusive). Raises BusUnavailable if
    interrupted."""
    messages: dict[str | int, StoredMessage] = {}
    done = asyncio.get_running_loop().create_future()

    def on_message(message: StoredMessage, pending: int) -> None:
        is_past = before_seq is not None and message.seq >= before_seq
        if not is_past:
            messages[message.subject if since_seq is None else message.seq] = message
            feed.take()
        if is_past or not pending or message.seq + 1 == before_seq:
            on_exhausted()

    def on_exhausted() -> None:
        if not done.done():
            done.set_result(None)

    def on_lost(reason: str) -> None:
        if not done.done():
            done.set_exception(BusUnavailable(f"Reading {stream} was interrupted: {reason}."))

    feed = await Feed.open(
        bus, stream, filter_subject, on_message, on_lost,
        since_seq=since_seq, before_seq=before_seq, headers_only=headers_only, on_exhausted=on_exhausted, waits=False,
    )  # fmt: skip
    try:
        if not feed.pending:
            on_exhausted()
        await done
        if since_seq is None:
            await feed.catch_up()
    finally:
        feed.close()
    found = list(messages.values())
    messages.clear()  # the feed and its handlers refer to each other, so they stay until the next garbage collection
    return found
