"""A map's items on their way to a gateway: in chunks, and no more ahead of the reader than its window.

What has come while one chunk was sent goes with the next: few items go at once, and many go many at a time.
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

MAX_WAIT_S: Final = 60.0  # for a limit of the key; then it is raised
_SHOWN_S: Final = 1.0
_CHUNK_BYTES: Final = 4 << 20  # beyond it a chunk takes no further item
_LINGER_S: Final = 0.002  # items that are there at once should share a chunk
_PATIENCE_S: Final = 60.0
_SHORTEST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0

# Send the items from a place on; the last argument tells that they are the last ones.
Send = Callable[[int, Sequence[bytes], bool], Any]
# How many items have been accepted, and whether there may be more.
Look = Callable[[], tuple[int, bool]]


class Outbox:
    """`put` items, then `close`; `total` is their number once the gateway has accepted all."""

    def __init__(
        self,
        send: Send,
        look: Look,
        *,
        window: int,
        first: int = 0,
        taken: int = 0,
        max_wait_s: float = MAX_WAIT_S,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`first`: the index of the first item. `taken`: how many ends the reader has taken already. A limit of the API
        key that lasts longer than `max_wait_s` is raised; `on_wait` receives a text for each shorter one, and an empty
        one when it is over."""
        self._send = send
        self._look = look
        self._window = window
        self._max_wait_s = max_wait_s
        self._on_wait = on_wait
        self._shown = ""
        self._lock = threading.Condition()
        self._items: deque[bytes] = deque()
        self._bytes = 0
        self._most = CHUNK_ITEMS  # items in the next chunk
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
        """Take the items of `source` in a thread, without what was accepted before; None: somebody else puts them.
        `accepted` is called once, when the first chunk has been; `failed` at most once."""
        context = contextvars.copy_context()
        if source is not None:
            threading.Thread(
                target=context.run, args=(self._take_from, source, encode, failed), name="gpufn-map-items", daemon=True
            ).start()
        threading.Thread(target=self._run, args=(accepted, failed), name="gpufn-map-send", daemon=True).start()

    def wait_for_room(self) -> bool:
        """Until one more item may be put; False when no more are wanted."""
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
        """`put` what `encode` makes of it. What cannot be sent is named; on the command line, by its line."""
        try:
            encoded = encode(item)
        except InvalidInput as error:
            if type(error) is InvalidInput:
                _name(self._put, error)
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
        """There are no more."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()

    @property
    def is_sending(self) -> bool:
        return not self._stopped and self.total is None

    def taken(self, count: int) -> None:
        """The reader has taken so many more ends."""
        with self._lock:
            self._taken += count
            self._lock.notify_all()

    def stop(self) -> None:
        """Take and send no more."""
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
                    at, is_last = self._behind(at, items)
                except PayloadTooLarge as error:  # of a chunk that is one item: more would not be in one
                    _name(at, error)
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

    def _behind(self, first: int, items: list[bytes]) -> tuple[int, bool]:
        """Go on behind what was accepted meanwhile: a request of whoever sent before us was still under way. Raises
        Conflict when that is not it."""
        accepted, is_open = self._look()
        known = accepted - first
        if is_open and not 0 < known <= len(items):
            raise Conflict(f"{accepted:,} items were accepted of this map, which are not those that follow")
        if is_open:
            self._put_back(items[known:])
        return accepted, not is_open

    def _next_chunk(self) -> tuple[list[bytes], bool] | None:
        with self._lock:
            while not (self._items or self._is_closed or self._stopped):
                self._lock.wait()
            self._lock.wait_for(
                lambda: len(self._items) >= self._most or self._is_closed or self._stopped, timeout=_LINGER_S
            )
            if self._stopped:
                return None
            items: list[bytes] = []
            size = 0
            while self._items and len(items) < self._most:
                if items and size + len(self._items[0]) > _CHUNK_BYTES:
                    break
                items.append(self._items.popleft())
                size += len(items[-1])
            self._bytes -= size
            self._lock.notify_all()
            return items, self._is_closed and not self._items

    def _try_to_send(self, first: int, items: list[bytes], is_last: bool) -> bool:
        """False when there is no room for it, and fewer are tried next; or nobody wants it any more. A chunk whose fate
        is unknown is sent again, and is the same one."""
        give_up = time.monotonic() + _PATIENCE_S
        pause_s = _SHORTEST_PAUSE_S
        is_unsure = False
        while not self._stopped:
            try:
                self._send(first, items, is_last)
            except CapacityError as error:
                if isinstance(error, RateLimited):
                    self._check_wait(error, first)
                self._rest(min(error.retry_after_s or pause_s, _LONGEST_PAUSE_S))
                if not is_unsure:
                    self._put_back(items)
                    self._most = max(1, len(items) // 2)
                    return False
            except (GatewayUnavailable, BusUnavailable):
                is_unsure = True
                if time.monotonic() > give_up:
                    raise
                self._rest(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._show("")
                self._most = min(2 * self._most, CHUNK_ITEMS)
                return True
        return False

    def _check_wait(self, error: RateLimited, accepted: int) -> None:
        """Raises `error` when it lasts too long: a day's budget that is used up comes back at midnight."""
        wait_s = error.retry_after_s or 0.0
        if wait_s > self._max_wait_s:
            error.message = f"{error.message.rstrip('.')}: {accepted:,} items of the map were accepted before"
            error.args = (error.message,)
            raise error
        if wait_s >= _SHOWN_S:
            self._show(f"waiting {wait_s:.0f} s: {error.message}")

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._on_wait(text)

    def _rest(self, pause_s: float) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._stopped, timeout=pause_s)

    def _put_back(self, items: list[bytes]) -> None:
        with self._lock:
            self._items.extendleft(reversed(items))
            self._bytes += sum(map(len, items))


def _name(index: int, error: GpufnError) -> None:
    """Of thousands, say which one it is, in the gateway's words."""
    error.message = f"items[{index}]: {error.message}"
    error.args = (error.message,)
