"""Async reader of a stream on top of Feed, with backpressure; it opens a new Feed when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Self

from gpufn_core.errors import PlatformError
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.ordered_reader import Feed, StoredMessage, last_seq, reopen_pause

log = logging.getLogger(__name__)


class Follower:
    """Reads the messages of a stream from `since_seq` on."""

    def __init__(self, bus: Bus, stream: str, filter_subject: str, since_seq: int) -> None:
        self._bus = bus
        self._stream = stream
        self._filter = filter_subject
        self._next_seq = since_seq
        self._ready: deque[StoredMessage] = deque()
        self._wake = asyncio.Event()
        self._feed: Feed | None = None

    async def is_drained(self) -> bool:
        """Return whether every stored message has been taken, according to the stream's leader."""
        newest_seq = await last_seq(self._bus, self._stream, self._filter)
        return not self._ready and newest_seq < self._next_seq  # check `_ready` last: messages may arrive meanwhile

    def wake(self) -> None:
        """Make `next_batch` return."""
        self._wake.set()

    async def next_batch(self, timeout_s: float) -> list[StoredMessage]:
        """Return the messages that have arrived. Empty after `timeout_s`, after `wake()`, or if reading failed."""
        if self._feed is None:  # not under the timeout, which would restart a slow open again and again
            await self._open()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self._feed is not None and not self._ready:
                    await self._wake.wait()
        self._wake.clear()
        messages = list(self._ready)
        self._ready.clear()
        for _ in messages:
            if self._feed is not None:  # each `take` may lose the feed
                self._feed.take()
        return messages

    async def next(self) -> StoredMessage:
        """Wait for the next message, however long that takes."""
        while not self._ready:
            if self._feed is None:
                await self._open()
                continue
            self._wake.clear()
            await self._wake.wait()
        message = self._ready.popleft()
        if self._feed is not None:
            self._feed.take()
        return message

    async def _open(self) -> None:
        try:
            self._feed = await Feed.open(
                self._bus, self._stream, self._filter, self._on_message, self._on_lost, since_seq=self._next_seq
            )
        except PlatformError as error:
            log.info("cannot follow %s: %s", self._filter, error)
            await reopen_pause()

    def _on_message(self, message: StoredMessage, pending: int) -> None:
        self._next_seq = message.seq + 1
        self._ready.append(message)
        self._wake.set()

    def _on_lost(self, reason: str) -> None:
        self._feed = None
        self._wake.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._feed is not None:
            self._feed.close()
