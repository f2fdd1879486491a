"""Streams that can be taken up again: a generator's items, kept for a reader that lost its connection.

1. the first request under an Idempotency-Key starts the call; its items are taken here, not by the connection
2. a reader gets those behind its `Last-Event-ID`, then each as it comes; the generator runs a window ahead of them
3. what was read is kept as well, for what was sent may never have arrived: the newest 16 MiB, and nothing while all
   streams together keep more than 256 MiB
4. a minute without a reader ends the call, and forgets one that has ended

They are in this process's memory: another gateway does not have them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from gpufn_core.errors import CapacityError, Conflict, IdempotencyMismatch, InvocationNotFound
from gpufn_core.protocol.frames import STREAM_WINDOW
from gpufn_core.protocol.messages import ItemReply, ResultReply
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue.pending import PendingStream

_KEPT_S: Final = 60.0
_KEPT_BYTES: Final = 16 << 20  # more than the buffers of a connection hold
_ITEM_BYTES: Final = 400  # what an item takes beside its body: all there is of a token's
_MOST: Final = 1000
_MOST_BYTES: Final = 256 << 20  # of all: beyond it none begins, and those that there are keep what nobody has read


class ItemsGone(Conflict):
    """The stream cannot go on from there: begin a new one."""

    retryable = False


class Kept:
    """What all streams keep together."""

    def __init__(self) -> None:
        self.bytes = 0


class KeptStream:
    """One invocation's items, `of_all` that are kept. `digest` tells a repeat of its request from another one."""

    def __init__(self, pending: PendingStream, digest: str, of_all: Kept) -> None:
        self.pending = pending
        self.digest = digest
        self.readers = 0
        self.left_at = 0.0  # when the last reader left; monotonic
        self._kept: deque[tuple[ItemReply, bytes]] = deque()
        self._kept_bytes = 0
        self._of_all = of_all
        self._first = 0  # number of the first that is kept
        self._read = 0  # so many have been read by somebody
        self._is_over = False
        self._changed = asyncio.Condition()
        self._taking = asyncio.create_task(self._take(), name=f"items of {pending.id}")

    async def _take(self) -> None:
        try:
            async for item, body in self.pending.items():
                self._kept.append((item, body))
                self._count(_ITEM_BYTES + len(body))
                async with self._changed:
                    self._changed.notify_all()
                    await self._changed.wait_for(lambda: self._end - self._read < STREAM_WINDOW)
        finally:
            async with self._changed:
                self._is_over = True
                self._changed.notify_all()

    async def items(self, first: int) -> AsyncIterator[tuple[ItemReply, bytes]]:
        """From number `first` on. Raises ItemsGone for a reader that others have left far behind."""
        number = first
        while (item := await self._at(number)) is not None:
            yield item
            number += 1

    async def _at(self, number: int) -> tuple[ItemReply, bytes] | None:
        """None behind the last one."""
        async with self._changed:
            await self._changed.wait_for(lambda: number < self._end or self._is_over)
            if number >= self._end:
                return None
            self.check(number)
            item = self._kept[number - self._first]
            self._read = max(self._read, number + 1)
            self._drop_old()
            self._changed.notify_all()
        return item

    def check(self, first: int) -> None:
        """Raises ItemsGone when it cannot be read from there."""
        if first < self._first:
            raise ItemsGone(f"items before {self._first} are not kept any more: use a new key for a new stream")
        if first > self._end:
            raise ItemsGone(f"item {first - 1} is not one of the {self._end} that there are so far")

    def close(self) -> None:
        self._taking.cancel()
        self._count(-self._kept_bytes)
        if not self.pending.future.done():
            self.pending.cancel()
        elif not self.pending.future.cancelled():
            self.pending.future.exception()  # nobody may have come back for it

    @property
    def _end(self) -> int:
        return self._first + len(self._kept)

    def _drop_old(self) -> None:
        while self._keeps_too_much and self._first < self._read:
            self._count(-_ITEM_BYTES - len(self._kept.popleft()[1]))
            self._first += 1

    @property
    def _keeps_too_much(self) -> bool:
        return self._kept_bytes > _KEPT_BYTES or self._of_all.bytes > _MOST_BYTES

    def _count(self, more_bytes: int) -> None:
        self._kept_bytes += more_bytes
        self._of_all.bytes += more_bytes


class Reader:
    """One connection's way through a KeptStream, in place of the PendingStream itself."""

    def __init__(self, stream: KeptStream, first: int) -> None:
        self.id = stream.pending.id
        self.future: asyncio.Future[tuple[ResultReply, bytes]] = asyncio.shield(stream.pending.future)
        self._stream = stream
        self._first = first

    def items(self) -> AsyncIterator[tuple[ItemReply, bytes]]:
        return self._stream.items(self._first)


class KeptStreams:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: dict[str, KeptStream] = {}
        self._of_all = Kept()

    @contextlib.contextmanager
    def reading(
        self,
        key: str,
        digest: str,
        after: int | None,
        begin: Callable[[], PendingStream],
    ) -> Iterator[Reader]:
        """Read the stream under this key behind item `after`; it is begun when there is none, and `after` is None.

        Raises IdempotencyMismatch when it is another request's, InvocationNotFound, ItemsGone, CapacityError.
        """
        stream = self._stream(key, digest, after, begin)
        first = 0 if after is None else after + 1
        stream.check(first)
        reader = Reader(stream, first)
        stream.readers += 1
        try:
            yield reader
        finally:
            stream.readers -= 1
            stream.left_at = self._clock.monotonic()
            if not reader.future.cancel() and not reader.future.cancelled():
                reader.future.exception()  # the client left before it could be told

    def _stream(self, key: str, digest: str, after: int | None, begin: Callable[[], PendingStream]) -> KeptStream:
        stream = self._streams.get(key)
        if stream is None:
            if after is not None:
                raise InvocationNotFound(
                    "The stream of this Idempotency-Key is not here, or not any more: leave out Last-Event-ID to begin "
                    "a new one."
                )
            if len(self._streams) >= _MOST or self._of_all.bytes > _MOST_BYTES:
                raise CapacityError("This gateway keeps as many streams as it can: try again, or without a key.")
            stream = self._streams[key] = KeptStream(begin(), digest, self._of_all)
        elif stream.digest != digest:
            raise IdempotencyMismatch
        return stream

    def sweep(self, now: float) -> None:
        """End and forget what nobody has read for a while. `now` is monotonic."""
        for key, stream in list(self._streams.items()):
            if not stream.readers and now - stream.left_at > _KEPT_S:
                del self._streams[key]
                stream.close()
