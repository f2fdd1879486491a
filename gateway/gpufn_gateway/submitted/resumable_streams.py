"""Resumable streams: buffer a generator's items so that a client can reconnect and continue.

1. The first request with an Idempotency-Key starts the call. Its items are received here, not by the connection.
2. A reader gets the items after its `Last-Event-ID`, then new ones as they arrive. The generator may run one window
   ahead of the readers.
3. Items that were read are kept as well, since sent data may not have arrived: the newest 16 MiB, and none while all
   streams together hold more than 256 MiB.
4. After a minute without a reader the call is cancelled, or forgotten if it has ended.

The items are in this process's memory: other gateways do not have them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from gpufn_core.errors import CapacityError, Conflict, IdempotencyMismatch, InvocationNotFound
from gpufn_core.protocol.messages import ItemReply, ResultReply
from gpufn_core.protocol.streams.stream_window import UnreadItems
from gpufn_gateway.http import sender
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue.pending import PendingStream

_IDLE_TIMEOUT_S: Final = 60.0
_STREAM_BYTES: Final = 16 << 20  # more than the buffers of a connection hold
_ITEM_OVERHEAD_BYTES: Final = 400  # memory per item in addition to its body; most of the cost of a token stream
_MAX_STREAMS: Final = 1000
_SHARE: Final = 4  # a sender has at most this many times the free streams: four fifths if it is alone
_MAX_TOTAL_BYTES: Final = 256 << 20  # all streams; beyond it none starts, and existing ones keep only unread items


class ItemsNotAvailable(Conflict):
    """The stream cannot continue from there: start a new one."""

    retryable = False


class BufferedBytes:
    """The bytes that all streams hold together."""

    def __init__(self) -> None:
        self.bytes = 0


class ResumableStream:
    """The buffered items of one invocation. `digest` identifies its request; `total` is the size of all streams."""

    def __init__(self, pending: PendingStream, digest: str, total: BufferedBytes, own: str) -> None:
        self.pending = pending
        self.digest = digest
        self.sender = own
        self.readers = 0
        self.idle_since = 0.0  # when the last reader disconnected; monotonic
        self._items: deque[tuple[ItemReply, bytes]] = deque()
        self._bytes = 0
        self._total = total
        self._first = 0  # number of the first buffered item
        self._read_until = 0  # number of items that at least one reader has read
        self._unread = UnreadItems()
        self._finished = False
        self._changed = asyncio.Condition()
        self._receiver = asyncio.create_task(self._receive_items(), name=f"items of {pending.id}")

    async def _receive_items(self) -> None:
        try:
            async for item, body in self.pending.items():
                self._items.append((item, body))
                self._add_bytes(_ITEM_OVERHEAD_BYTES + len(body))
                self._unread.add(len(body))
                async with self._changed:
                    self._changed.notify_all()
                    await self._changed.wait_for(lambda: self._unread.has_room)
        finally:
            async with self._changed:
                self._finished = True
                self._changed.notify_all()

    async def items(self, first: int) -> AsyncIterator[tuple[ItemReply, bytes]]:
        """Yield the items from number `first` on. Raises ItemsNotAvailable if other readers are too far ahead."""
        number = first
        while (item := await self._item(number)) is not None:
            yield item
            number += 1

    async def _item(self, number: int) -> tuple[ItemReply, bytes] | None:
        """Wait for an item; None after the last one."""
        async with self._changed:
            await self._changed.wait_for(lambda: number < self._end or self._finished)
            if number >= self._end:
                return None
            self.check(number)
            item = self._items[number - self._first]
            self._read_until = max(self._read_until, number + 1)
            self._unread.read_until(self._read_until)
            self._drop_old()
            self._changed.notify_all()
        return item

    def check(self, first: int) -> None:
        """Raises ItemsNotAvailable if the stream cannot be read from number `first` on."""
        if first < self._first:
            raise ItemsNotAvailable(
                f"items before {self._first} are no longer available: use a new key for a new stream"
            )
        if first > self._end:
            raise ItemsNotAvailable(f"item {first - 1} does not exist: the stream has {self._end} items so far")

    def close(self) -> None:
        self._receiver.cancel()
        self._add_bytes(-self._bytes)
        if not self.pending.future.done():
            self.pending.cancel()
        elif not self.pending.future.cancelled():
            self.pending.future.exception()  # mark it as retrieved: there may have been no reader

    @property
    def _end(self) -> int:
        return self._first + len(self._items)

    def _drop_old(self) -> None:
        while self._is_over_limit and self._first < self._read_until:
            self._add_bytes(-_ITEM_OVERHEAD_BYTES - len(self._items.popleft()[1]))
            self._first += 1

    @property
    def _is_over_limit(self) -> bool:
        return self._bytes > _STREAM_BYTES or self._total.bytes > _MAX_TOTAL_BYTES

    def _add_bytes(self, size: int) -> None:
        self._bytes += size
        self._total.bytes += size


class StreamReader:
    """One connection's view of a ResumableStream, with the interface of a PendingStream."""

    def __init__(self, stream: ResumableStream, first: int) -> None:
        self.id = stream.pending.id
        self.future: asyncio.Future[tuple[ResultReply, bytes]] = asyncio.shield(stream.pending.future)
        self._stream = stream
        self._first = first

    def items(self) -> AsyncIterator[tuple[ItemReply, bytes]]:
        return self._stream.items(self._first)


class ResumableStreams:
    """The resumable streams of a gateway, by key."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: dict[str, ResumableStream] = {}
        self._total = BufferedBytes()

    @contextlib.contextmanager
    def reading(
        self, key: str, digest: str, after: int | None, start: Callable[[], PendingStream]
    ) -> Iterator[StreamReader]:
        """Read the stream of this key after item `after`. Starts the stream if there is none and `after` is None.

        Raises IdempotencyMismatch if the key belongs to another request, InvocationNotFound, ItemsNotAvailable,
        CapacityError.
        """
        stream = self._stream(key, digest, after, start)
        first = 0 if after is None else after + 1
        stream.check(first)
        reader = StreamReader(stream, first)
        stream.readers += 1
        try:
            yield reader
        finally:
            stream.readers -= 1
            stream.idle_since = self._clock.monotonic()
            if not reader.future.cancel() and not reader.future.cancelled():
                reader.future.exception()  # mark it as retrieved: the client disconnected before it was sent

    def _stream(self, key: str, digest: str, after: int | None, start: Callable[[], PendingStream]) -> ResumableStream:
        stream = self._streams.get(key)
        if stream is None:
            if after is not None:
                raise InvocationNotFound(
                    "This gateway has no stream for this Idempotency-Key; it may have expired. Omit Last-Event-ID to "
                    "start a new one."
                )
            own = sender.current.get()
            if self._are_used_up(own) or self._total.bytes > _MAX_TOTAL_BYTES:
                raise CapacityError("This gateway has too many resumable streams: retry later, or send no key.")
            stream = self._streams[key] = ResumableStream(start(), digest, self._total, own)
        elif stream.digest != digest:
            raise IdempotencyMismatch
        return stream

    def _are_used_up(self, own: str) -> bool:
        """Return True if a sender may start no further stream."""
        free = _MAX_STREAMS - len(self._streams)
        return free <= 0 or sum(stream.sender == own for stream in self._streams.values()) >= _SHARE * free

    def sweep(self, now: float) -> None:
        """Close the streams that had no reader for a minute. `now` is monotonic."""
        for key, stream in list(self._streams.items()):
            if not stream.readers and now - stream.idle_since > _IDLE_TIMEOUT_S:
                del self._streams[key]
                stream.close()
