"""Reading a stream in order, without taking anything out of it: the part that logs and key-value watches share.

A Feed is one short-lived consumer on the server and is never mended: a gap, a refusal, silence or a reconnect end it
with `on_lost(why)`, once, and its owner opens another where it left off.

In a cluster the consumer may be on a node that has just come back and has not caught up. What it shows then is the
past: records would seem to have vanished. So the stream's leader is asked first what the newest message is. And the way
to that node may be known a moment later than the consumer is there: a first request that finds nobody is made again.
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

# Messages asked for ahead of what the reader has taken: so many until it is known how large they are, then as many as
# are so many bytes, within bounds.
_FIRST_WINDOW = 64
_WINDOW_BYTES = 16 << 20
_SMALLEST_WINDOW, _LARGEST_WINDOW = 4, 512
_EXPIRES_S = 30
_HEARTBEAT_S = 5
_NANO = 1_000_000_000
_REOPEN_S = 0.05
_CATCH_UP_S = 2.0
_FOUND_WITHIN_S = 2.0
_LOOKS, _LOOK_S = 10, 0.05  # at what is newest: somebody may write all the time, and the newest may expire


class StoredMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    payload: bytes
    headers: dict[str, str]
    time: float  # seconds since the epoch, by the server's clock


class Feed:
    def __init__(
        self,
        bus: Bus,
        stream: str,
        filter_subject: str,
        on_message: Callable[[StoredMessage, int], None],
        *,
        waits: bool,
    ) -> None:
        self.pending = 0
        self._waits = waits
        self._bus = bus
        self._stream = stream
        self._name = f"feed-{secrets.token_hex(8)}"
        self._on_message = on_message
        self._on_lost: Callable[[str], None] | None = None  # while it is opened
        self._on_no_more: Callable[[], None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._has_all = False  # that can be read
        self._filter = filter_subject
        self._moved = asyncio.Event()
        self._asked = 0
        self._untaken = 0
        self._window = _FIRST_WINDOW
        self._mean_bytes = 0.0
        self._consumer_seq = 0
        self._seq = 0
        self._newest_seq = 0  # what the leader had when we began; 0: nothing, or there is only one node
        self._heard = True
        self._is_found = False  # the consumer has answered
        self._find_by = asyncio.get_running_loop().time() + _FOUND_WITHIN_S
        self._moved_at = asyncio.get_running_loop().time()  # the last message came, or we began
        self._inbox = bus.new_inbox()
        self._subscription: Subscription | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._behind_timer: asyncio.TimerHandle | None = None
        self._ask_timer: asyncio.TimerHandle | None = None
        self._forget_reconnects: Callable[[], None] | None = None

    @classmethod
    async def open(
        cls,
        bus: Bus,
        stream: str,
        filter_subject: str,
        on_message: Callable[[StoredMessage, int], None],
        on_lost: Callable[[str], None],
        *,
        since_seq: int | None = None,
        headers_only: bool = False,
        on_no_more: Callable[[], None] | None = None,
        waits: bool = True,
    ) -> Feed:
        """From `since_seq` on, or else the newest message of each subject first and then what is new.
        `headers_only`: without their payloads. `waits` False: the reader needs only what is stored now, and learns at
        once when a part of it has been removed; a Feed that waits learns it from a heartbeat.

        `on_message(message, pending)` must be followed by `take()` once the reader has dealt with the message.
        `pending`: how many are known to follow, also on the Feed itself. When those will not come, for they were
        removed meanwhile or are damaged on the server's disk, `on_no_more` is called once; without it the Feed is lost:
        nothing else would tell. Raises BusUnavailable, JetStreamError; `on_lost` is for what was open.
        """
        feed = cls(bus, stream, filter_subject, on_message, waits=waits)
        feed._on_no_more = on_no_more
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
        if self._bus.server_info.get("cluster"):
            newest_seq = await last_seq(self._bus, self._stream, self._filter)
            self._newest_seq = newest_seq if newest_seq >= (since_seq or 0) else 0
        info = await self._bus.js(
            f"CONSUMER.CREATE.{self._stream}.{self._name}.{self._filter}",
            {"stream_name": self._stream, "config": config, "action": "create"},
        )
        self.pending = self._still_pending(int(info["num_pending"]))
        self._subscription = self._bus.subscribe(self._inbox, self._on_delivery)
        self._forget_reconnects = self._bus.on_reconnect(lambda: self._lost("reconnected"))
        self._watch()
        if self._waits or self.pending:
            self._ask()
        if not self.is_open:
            raise BusUnavailable(f"Reading {self._stream} broke off as it began.")
        self._on_lost = on_lost
        if self._newest_seq:
            self._behind_timer = asyncio.get_running_loop().call_later(_CATCH_UP_S, self._must_have_caught_up)

    @property
    def is_open(self) -> bool:
        return self._subscription is not None

    async def catch_up(self) -> None:
        """Return when nothing newer is stored than has been delivered: what is written again while the newest message
        of each subject is read comes behind the others, when nothing seems to be pending any more.

        Raises BusUnavailable when the Feed is lost before."""
        for _ in range(_LOOKS):
            newest_seq = await last_seq(self._bus, self._stream, self._filter)
            if not self.is_open:
                raise BusUnavailable(f"Reading {self._stream} broke off.")
            if self._seq >= newest_seq:
                return
            if not self._waits:
                self._ask()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    while self._seq < newest_seq:
                        self._moved.clear()
                        await self._moved.wait()

    def take(self) -> None:
        """The reader has dealt with one more message."""
        self._untaken -= 1
        # The server refuses a request that does not wait when the requests before it take all that is pending.
        may_ask = self._waits or self.pending > self._asked
        if may_ask and self._asked + self._untaken <= self._window // 2:
            self._ask()

    def close(self) -> None:
        self._on_lost = None
        for timer in (self._timer, self._behind_timer, self._ask_timer):
            if timer is not None:
                timer.cancel()
        if self._checking is not None:
            self._checking.cancel()
        if self._forget_reconnects is not None:
            self._forget_reconnects()
        if self._subscription is not None:
            self._subscription.unsubscribe()
            self._subscription = None
            # Not awaited: if this gets lost, the server removes the consumer after its inactive_threshold.
            with contextlib.suppress(BusUnavailable):
                self._bus.publish(f"{jetstream.API}CONSUMER.DELETE.{self._stream}.{self._name}", b"")

    def _ask(self) -> None:
        batch = self._window - self._asked - self._untaken
        if batch <= 0:
            return
        body: dict[str, Any] = {"batch": batch, "no_wait": True}
        if self._waits:
            body = {"batch": batch, "expires": _EXPIRES_S * _NANO, "idle_heartbeat": _HEARTBEAT_S * _NANO}
        try:
            self._bus.publish(
                f"{jetstream.API}CONSUMER.MSG.NEXT.{self._stream}.{self._name}",
                msgspec.json.encode(body),
                reply=self._inbox,
            )
        except BusUnavailable as error:
            self._lost(error.message)
        else:
            self._asked += batch

    def _watch(self) -> None:
        if not self._heard and self._asked:
            self._lost("no heartbeat")
            return
        self._heard = False
        self._timer = asyncio.get_running_loop().call_later(2.2 * _HEARTBEAT_S, self._watch)

    def _still_pending(self, pending: int) -> int:
        """`pending` is what the consumer's node knows of."""
        if self._has_all:  # what is damaged is counted for ever
            return 0
        return pending or int(self._seq < self._newest_seq)

    def _must_have_caught_up(self) -> None:
        """The newest message may have been removed before we came to it, too: then there is another newest one."""
        if self._still_pending(0) and not self._untaken:
            self._lost("its node is behind")

    def _on_delivery(self, message: Message) -> None:
        self._heard = True
        loop = asyncio.get_running_loop()
        if message.status == 503 and not self._is_found and loop.time() < self._find_by:
            self._asked = 0
            self._ask_timer = loop.call_later(_REOPEN_S, self._ask)
            return
        self._is_found = True
        if not self._waits and message.status in (404, 408):  # every request under way has ended: nothing more is there
            self._asked = 0
            if self.pending:
                self._start_check()
        elif message.status == 408:
            self._asked -= int((message.headers or {}).get("Nats-Pending-Messages", self._asked))
            self._ask()
        elif message.status == 100:  # a heartbeat comes when there is nothing to send
            if self.pending and self._on_no_more is None:
                self._lost("what was to come was removed")
            elif self.pending:
                self._start_check()
        elif message.status:
            self._lost(f"{message.status} {message.description}")
        else:
            _, seq, consumer_seq, time, pending = ack_tokens(message.reply)
            self._consumer_seq += 1
            if consumer_seq != self._consumer_seq:
                self._lost(f"a gap before {seq}")
                return
            self._asked -= 1
            self._untaken += 1
            self._learn(len(message.payload))
            self._seq, self._moved_at = seq, loop.time()
            stored = StoredMessage(message.subject, seq, message.payload, message.headers or {}, time)
            self.pending = self._still_pending(pending)
            self._on_message(stored, self.pending)
            self._moved.set()

    def _start_check(self) -> None:
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check(), name=f"{self._name}-check")

    async def _check(self) -> None:
        """Whether there is nothing to be read behind what has come, by the word of the stream's leader."""
        come, found = self._consumer_seq, True
        body = {"next_by_subj": self._filter, "seq": self._seq + 1}
        with contextlib.suppress(BusUnavailable):
            try:
                await self._bus.js(f"STREAM.MSG.GET.{self._stream}", body)
            except JetStreamError as error:
                found = error.err_code not in jetstream.NOT_FOUND
        if self._consumer_seq != come:
            return  # the next heartbeat asks anew
        loop = asyncio.get_running_loop()
        if found and not self._waits and loop.time() < self._moved_at + _CATCH_UP_S:  # its node is behind
            self._ask_timer = loop.call_later(_REOPEN_S, self._ask)
            return
        if found or self._on_no_more is None:
            self._lost("what was to come was removed")
            return
        self._has_all, self.pending = True, 0
        self._on_no_more()

    def _learn(self, size: int) -> None:
        """One more message was of this size."""
        self._mean_bytes += (size - self._mean_bytes) / min(self._consumer_seq, _FIRST_WINDOW)
        if self._consumer_seq >= _SMALLEST_WINDOW:
            fits = int(_WINDOW_BYTES / max(1.0, self._mean_bytes))
            self._window = min(max(fits, _SMALLEST_WINDOW), _LARGEST_WINDOW)

    def _lost(self, why: str) -> None:
        on_lost = self._on_lost
        self.close()
        if on_lost is not None:
            on_lost(why)


async def last_seq(bus: Bus, stream: str, filter_subject: str) -> int:
    """Of the newest message, by the word of the stream's leader; 0 when there is none."""
    try:
        answer = await bus.js(f"STREAM.MSG.GET.{stream}", {"last_by_subj": filter_subject})
    except JetStreamError as error:
        if error.err_code == jetstream.NO_MESSAGE:
            return 0
        raise
    return int(answer["message"]["seq"])


async def reopen_pause() -> None:
    """Before a lost Feed is opened again: with jitter, for a restart ends all of them at once."""
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
    """What a Feed would deliver now, or as much of it as is before `before_seq`. Raises BusUnavailable when it breaks
    off."""
    found: dict[str | int, StoredMessage] = {}
    done = asyncio.get_running_loop().create_future()

    def on_message(message: StoredMessage, pending: int) -> None:
        is_past = before_seq is not None and message.seq >= before_seq
        if not is_past:
            found[message.subject if since_seq is None else message.seq] = message
            feed.take()
        if is_past or not pending:
            on_no_more()

    def on_no_more() -> None:
        if not done.done():
            done.set_result(None)

    def on_lost(why: str) -> None:
        if not done.done():
            done.set_exception(BusUnavailable(f"Reading {stream} broke off: {why}."))

    feed = await Feed.open(
        bus, stream, filter_subject, on_message, on_lost,
        since_seq=since_seq, headers_only=headers_only, on_no_more=on_no_more, waits=False,
    )  # fmt: skip
    try:
        if not feed.pending:
            on_no_more()
        await done
        if since_seq is None:
            await feed.catch_up()
    finally:
        feed.close()
    return list(found.values())
