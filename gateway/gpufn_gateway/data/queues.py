"""Queues by name, in one work-queue stream: a subject and a pull consumer for each queue.

put    stores the item on the queue's subject. An item with a time to live disappears after it
get    takes the first item with a lease. It is delivered again when the lease ends without an acknowledgement, so an
       item is delivered at least once
ack    removes the item; release delivers it again at once

An item that was delivered too often is moved to the queue `NAME-dead` by the next `get` that has a limit.

The lease is the consumer's `ack_wait`; the last `get` decides it for the queue. A lease's token is the acknowledgement
subject without its prefix. It is checked, because a client could name any other subject.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.errors import BusUnavailable, Conflict, DataNotFound, InvalidInput, PayloadTooLarge, QueueFull
from gpufn_core.protocol import subjects
from gpufn_core.protocol.data import ITEM_BYTES, MAX_ITEMS, check_max_deliveries, check_seconds, dead_letters_of
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.jetstream import NoResponders
from gpufn_platform.bus.nats_protocol import ack_tokens
from gpufn_platform.bus.storage import streams

_NANO: Final = 1_000_000_000
_MAX_LEASED: Final = 10_000  # items of a queue that are leased at a time
_TRIES: Final = 3  # the queue may be deleted meanwhile
_ACK: Final = "$JS.ACK."
_TYPE: Final = "Gpufn-Content-Type"
_MARGIN_S: Final = 2.0  # for a response of the server after the wait


class Item(NamedTuple):
    """A leased item. `deliveries` counts from 1. `sequence` is the item's number in the stream."""

    content_type: str
    value: bytes
    lease: str
    deliveries: int
    sequence: int


class Queues:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def all(self) -> dict[str, int]:
        """Return the number of stored items, by queue. A queue without items does not exist."""
        found = await streams.messages_per_subject(self._bus, subjects.QUEUES, subjects.QUEUES_FILTER)
        return {subjects.queue_name(subject): count for subject, count in sorted(found.items())}

    async def size(self, name: str) -> int:
        """Return the number of items, with the leased ones."""
        return await streams.count(self._bus, subjects.QUEUES, subjects.queue(name))

    async def put(
        self, name: str, content_type: str, value: bytes, *, ttl_s: float | None, max_items: int | None, id_: str
    ) -> None:
        """Store an item. A second one with the same `id_` within two minutes has no effect. Raises PayloadTooLarge,
        QueueFull, InvalidInput."""
        check_size(value, f"an item of {name}")
        check_seconds("ttl", ttl_s)
        if max_items is not None and await self.size(name) >= max_items:
            raise QueueFull(f"{name} has {max_items:,} items, as many as it may have.", retry_after_s=1.0)
        try:
            await self._bus.publish_stored(
                subjects.queue(name), value, msg_id=f"{name}:{id_}" if id_ else None, ttl_s=ttl_s,
                headers={_TYPE: content_type},
            )  # fmt: skip
        except QueueFull as error:
            raise QueueFull(f"{name} has {MAX_ITEMS:,} items, or the stream of queues is full.") from error

    async def get(self, name: str, *, wait_s: float, lease_s: float, max_deliveries: int | None = None) -> Item | None:
        """Lease the first item, after waiting for one for at most `wait_s`; None if none came. Items that had
        `max_deliveries` before are moved to the dead letters. Raises InvalidInput."""
        if max_deliveries is None:
            return await self._lease(name, wait_s, lease_s)
        check_max_deliveries(name, max_deliveries)
        ends_at = time.monotonic() + wait_s
        while (item := await self._lease(name, max(0.0, ends_at - time.monotonic()), lease_s)) is not None:
            if item.deliveries <= max_deliveries:
                return item
            # In this order: after a crash between the two, the next `get` repeats the first one, which has no effect.
            id_ = f"{name}:{item.sequence}"
            await self.put(dead_letters_of(name), item.content_type, item.value, ttl_s=None, max_items=None, id_=id_)
            await self.settle(name, item.lease, is_done=True)
        return None

    async def _lease(self, name: str, wait_s: float, lease_s: float) -> Item | None:
        for _ in range(_TRIES):
            await self._ensure_consumer(name, lease_s)
            with contextlib.suppress(_NoConsumer):
                return await self._next(name, wait_s)
        raise BusUnavailable(f"The queue {name} is being deleted again and again.")

    async def settle(self, name: str, lease: str, *, is_done: bool) -> None:
        """Remove a leased item, or with `is_done` False deliver it again. Raises InvalidInput."""
        consumer = re.escape(subjects.queue_consumer(name))
        of_cluster, end = r"(?:[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.)?", r"(?:\.[0-9]+){5}(?:\.[A-Za-z0-9]+)?"
        pattern = rf"{of_cluster}{subjects.QUEUES}\.{consumer}{end}"
        if re.fullmatch(pattern, lease) is None:
            raise InvalidInput(f"this is not the lease of an item of {name}", field="lease")
        try:
            await self._bus.request_server(f"{_ACK}{lease}", b"+ACK" if is_done else b"-NAK")
        except NoResponders:
            raise LeaseEnded(f"The lease of this item of {name} has ended: the item may be delivered again.") from None

    async def remove(self, name: str) -> None:
        """Delete a queue with its items. Raises DataNotFound if it has none, and nobody took one in the last hour."""
        items = await streams.purge(self._bus, subjects.QUEUES, subjects.queue(name))
        was_used = await streams.delete_consumer(self._bus, subjects.QUEUES, subjects.queue_consumer(name))
        if not items and not was_used:
            raise no_such_queue(name)

    async def _ensure_consumer(self, name: str, lease_s: float) -> None:
        """Create the consumer, or update its lease. The comparison is with the
        server, because other gateways update the lease too."""
        check_seconds("lease", lease_s)
        consumer = f"{subjects.QUEUES}.{subjects.queue_consumer(name)}"
        info = await self._bus.js_or_none(f"CONSUMER.INFO.{consumer}")
        if info is not None and info["config"].get("ack_wait") == int(lease_s * _NANO):
            return
        await streams.ensure_consumer(
            self._bus,
            subjects.QUEUES,
            subjects.queue_consumer(name),
            subjects.queue(name),
            ack_wait_s=lease_s,
            max_ack_pending=_MAX_LEASED,
        )

    async def _next(self, name: str, wait_s: float) -> Item | None:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[Message] = loop.create_future()

        def on_message(message: Message) -> None:
            if not arrived.done():
                arrived.set_result(message)
            elif not message.status:  # the client has disconnected: the item is for another client
                self._bus.publish(message.reply, b"-NAK")

        inbox = self._bus.new_inbox()
        subscription = self._bus.subscribe(inbox, on_message)
        request: Mapping[str, Any] = {"batch": 1, "expires": int(wait_s * _NANO)} if wait_s else {
            "batch": 1, "no_wait": True
        }  # fmt: skip
        subject = f"{jetstream.API}CONSUMER.MSG.NEXT.{subjects.QUEUES}.{subjects.queue_consumer(name)}"
        try:
            self._bus.publish(subject, msgspec.json.encode(request), reply=inbox)
            async with asyncio.timeout(wait_s + _MARGIN_S):
                message = await arrived
        except TimeoutError:
            raise BusUnavailable("The message bus did not answer in time.") from None
        finally:
            if arrived.done() and not arrived.cancelled():
                subscription.unsubscribe()
            else:  # an item may still come
                arrived.cancel()
                loop.call_later(wait_s + _MARGIN_S, subscription.unsubscribe)
        if message.status == 503:
            raise _NoConsumer
        if message.status:
            return None
        content_type = (message.headers or {}).get(_TYPE, "")
        return Item(content_type, message.payload, message.reply.removeprefix(_ACK), *ack_tokens(message.reply)[:2])


def no_such_queue(name: str) -> DataNotFound:
    return DataNotFound(f"There is no queue {name}: see `gpufn queue ls`.")


class LeaseEnded(Conflict):
    """The queue of a lease was deleted, or was idle for an hour."""

    retryable = False


class _NoConsumer(Exception):
    """The server has no consumer for the queue: it was idle for an hour, or the queue was deleted."""


def check_size(value: bytes, what: str) -> None:
    """Raises PayloadTooLarge."""
    if len(value) > ITEM_BYTES:
        raise PayloadTooLarge(
            f"{what} has {len(value):,} bytes, more than the {ITEM_BYTES:,} allowed: put it into a volume, and store "
            "its path"
        )
