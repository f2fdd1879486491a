"""Sender of a map's items to a gateway: in chunks, and at most a window ahead of the reader.

Items that arrive while a chunk is being sent go into the next chunk. So few items are sent without delay, and many
items are sent in large chunks.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gpufn_core.errors import (
    BusUnavailable,
    CapacityError,
    Conflict,
    GatewayUnavailable,
    GpufnError,
    InvalidInput,
    PayloadTooLarge,
    RateLimited,
)
from gpufn_core.protocol.limits import CHUNK_ITEMS

MAX_WAIT_S: Final = 60.0  # a longer limit of the API key is raised
_MIN_SHOWN_WAIT_S: Final = 1.0
_CHUNK_BYTES: Final = 4 << 20  # maximum of a chunk of several items
_LINGER_S: Final = 0.002  # so that items that arrive together share a chunk
_RETRY_S: Final = 60.0
_MIN_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 5.0

# Sends items. The arguments are the index of the first item, the items, and whether they are the last ones.
Send = Callable[[int, Sequence[bytes], bool], Any]
# Returns the number of accepted items, and whether the map is open.
GetAccepted = Callable[[], tuple[int, bool]]


class ItemSender:
    """Sends items: `put` them, then `close`. `total` is their number once the gateway has accepted all."""

    def __init__(
        self,
        send: Send,
        get_accepted: GetAccepted,
        *,
        window: int,
        first: int = 0,
        taken: int = 0,
        max_wait_s: float = MAX_WAIT_S,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`first` is the index of the first item. `taken` is the number of outcomes that the reader has already taken.

        A limit of the API key that lasts longer than `max_wait_s` is raised. `on_wait` receives a text for each shorter
        limit, and an empty text when the wait is over.
        """
        self._send = send
        self._get_accepted = get_accepted
        self._window = window
        self._max_wait_s = max_wait_s
        self._on_wait = on_wait
        self._shown = ""
        self._lock = threading.Condition()
        self._items: deque[bytes] = deque()
        self._bytes = 0
        self._max_items = CHUNK_ITEMS  # in the next chunk
        self._put = self.first = first
        self._taken = taken
        self._is_closed = False
        self._stopped = False
        self.total: int | None = None

    def start(
        self,
        source: Iterable[Any] | None,
        encode: Callable[[Any], bytes],
        *,
        accepted: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Start to send, and to take the items of `source` in a thread. Skips the items before `first`.

        Without a source, the caller puts the items. `accepted` is called once, when the first chunk has been accepted;
        `failed` is called at most once.
        """
        context = contextvars.copy_context()
        if source is not None:
            threading.Thread(
                target=context.run, args=(self._take_from, source, encode, failed), name="gpufn-map-items", daemon=True
            ).start()
        threading.Thread(target=self._run, args=(accepted, failed), name="gpufn-map-send", daemon=True).start()

    def wait_for_room(self) -> bool:
        """Wait until one more item may be put. Return False if the sender is closed or stopped."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_over or self._has_room)
            return not self._is_over

    @property
    def _is_over(self) -> bool:
        return self._stopped or self._is_closed

    @property
    def _has_room(self) -> bool:
        return self._put - self._taken < self._window and self._bytes <= 2 * _CHUNK_BYTES

    def encode(self, item: Any, encode: Callable[[Any], bytes]) -> None:
        """Encode an item and `put` it. An InvalidInput gets the index of the item.

        The command line raises a subclass, which has the number of the line instead.
        """
        try:
            encoded = encode(item)
        except InvalidInput as error:
            if type(error) is InvalidInput:
                _add_index(self._put, error)
            raise
        self.put(encoded)

    def put(self, item: bytes) -> None:
        with self._lock:
            if self._is_over:
                return
            self._items.append(item)
            self._bytes += len(item)
            self._put += 1
            if len(self._items) in (1, CHUNK_ITEMS):
                self._lock.notify_all()

    def close(self) -> None:
        """Mark the items as complete."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()

    @property
    def is_sending(self) -> bool:
        return not self._stopped and self.total is None

    def report_taken(self, count: int) -> None:
        """Report that the reader has taken `count` more outcomes."""
        with self._lock:
            self._taken += count
            self._lock.notify_all()

    def stop(self) -> None:
        """Stop taking and sending items."""
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def _take_from(
        self, source: Iterable[Any], encode: Callable[[Any], bytes], failed: Callable[[BaseException], None]
    ) -> None:
        skipped = 0
        try:
            items = iter(source)
            while self.wait_for_room():
                try:
                    item = next(items)
                except StopIteration:
                    self.close()
                    return
                if skipped < self.first:
                    skipped += 1
                else:
                    self.encode(item, encode)
        except BaseException as error:
            self.stop()
            failed(error)

    def _run(self, accepted: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        at, is_first = self.first, True
        try:
            while (chunk := self._next_chunk()) is not None:
                items, is_last = chunk
                try:
                    if not self._try_to_send(at, items, is_last):
                        continue
                except Conflict:
                    at, is_last = self._resume(at, items)
                except PayloadTooLarge as error:  # the chunk is one item: `_CHUNK_BYTES` limits chunks of several
                    _add_index(at, error)
                    raise
                else:
                    at += len(items)
                if is_first:
                    accepted()
                    is_first = False
                if is_last:
                    self.total = at
                    return
        except BaseException as error:
            self.stop()
            failed(error)

    def _resume(self, first: int, items: list[bytes]) -> tuple[int, bool]:
        """Continue after items that were accepted from a request of an earlier sender, which was still in flight.

        Return the index of the next item, and whether the map is closed. Raises Conflict if this is not the reason for
        the conflict.
        """
        accepted, is_open = self._get_accepted()
        already_accepted = accepted - first
        if is_open and not 0 < already_accepted <= len(items):
            raise Conflict(
                f"{accepted:,} items of this map were accepted, which does not match item {first:,} of this source"
            )
        if is_open:
            self._put_back(items[already_accepted:])
        return accepted, not is_open

    def _next_chunk(self) -> tuple[list[bytes], bool] | None:
        with self._lock:
            while not (self._items or self._is_closed or self._stopped):
                self._lock.wait()
            self._lock.wait_for(
                lambda: len(self._items) >= self._max_items or self._is_closed or self._stopped, timeout=_LINGER_S
            )
            if self._stopped:
                return None
            items: list[bytes] = []
            size = 0
            while self._items and len(items) < self._max_items:
                if items and size + len(self._items[0]) > _CHUNK_BYTES:
                    break
                items.append(self._items.popleft())
                size += len(items[-1])
            self._bytes -= size
            self._lock.notify_all()
            return items, self._is_closed and not self._items

    def _try_to_send(self, first: int, items: list[bytes], is_last: bool) -> bool:
        """Send a chunk. Return False if there was no room and the next chunk is smaller, or if the sender was stopped.

        A chunk that may have been accepted is sent again unchanged.
        """
        deadline = time.monotonic() + _RETRY_S
        backoff_s = _MIN_BACKOFF_S
        may_be_accepted = False
        while not self._stopped:
            try:
                self._send(first, items, is_last)
            except CapacityError as error:
                if isinstance(error, RateLimited):
                    self._check_limit(error, first)
                self._pause(min(error.retry_after_s or backoff_s, _MAX_BACKOFF_S))
                if not may_be_accepted:
                    self._put_back(items)
                    self._max_items = max(1, len(items) // 2)
                    return False
            except (GatewayUnavailable, BusUnavailable):
                may_be_accepted = True
                if time.monotonic() > deadline:
                    raise
                self._pause(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            else:
                self._show("")
                self._max_items = min(2 * self._max_items, CHUNK_ITEMS)
                return True
        return False

    def _check_limit(self, error: RateLimited, accepted: int) -> None:
        """Raise `error` if the limit lasts too long. A daily budget that is used up lasts until midnight."""
        wait_s = error.retry_after_s or 0.0
        if wait_s > self._max_wait_s:
            error.message = f"{error.message.rstrip('.')}: {accepted:,} items of the map were accepted before"
            error.args = (error.message,)
            raise error
        if wait_s >= _MIN_SHOWN_WAIT_S:
            self._show(f"waiting {wait_s:.0f} s: {error.message}")

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._on_wait(text)

    def _pause(self, pause_s: float) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._stopped, timeout=pause_s)

    def _put_back(self, items: list[bytes]) -> None:
        with self._lock:
            self._items.extendleft(reversed(items))
            self._bytes += sum(map(len, items))


def _add_index(index: int, error: GpufnError) -> None:
    """Put the index of the item before the message, as a gateway does."""
    error.message = f"items[{index}]: {error.message}"
    error.args = (error.message,)
