"""The ends of a map's items, as they come from a gateway.

ends_of    the records of `media.OUTCOMES` → Ends
InOrder    Ends as they come → in the order of the items, with bounded memory
patiently  asks a gateway that is away once more
Inbox      a thread that reads them, and comes again behind the last one when its connection breaks
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, TypeVar

from gpufn_core.encoding import media
from gpufn_core.errors import BusUnavailable, GatewayUnavailable, InvalidInput

T = TypeVar("T")

_MOST_BYTES: Final = 32 << 20  # read and not yet taken, and again as many that wait for an earlier item
_MOST_ENDS: Final = 4096
_PATIENCE_S: Final = 60.0  # a gateway that is started again is there sooner
_SHORTEST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_CURSOR = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,18}){1,2}")


class End(NamedTuple):
    """How an item ended: its result, or a problem as JSON. `seq` and `ended` are its place among all ends."""

    kind: media.OutcomeKind
    item: int
    seq: int
    ended: int
    content_type: str
    body: bytes


class Cursor(NamedTuple):
    """Where a reader of a map is: every end up to `seq` has been taken, which were `ended`; and if it takes them in
    order, every item below `item`.

    >>> str(Cursor(17, 3)), Cursor.read("17.3.5")
    ('17.3', Cursor(seq=17, ended=3, item=5))
    """

    seq: int = 0
    ended: int = 0
    item: int | None = None

    def __str__(self) -> str:
        return self.wire if self.item is None else f"{self.wire}.{self.item}"

    @property
    def wire(self) -> str:
        """As the gateway wants it."""
        return f"{self.seq}.{self.ended}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Raises InvalidInput."""
        if not isinstance(text, str) or _CURSOR.fullmatch(text or "0.0") is None:
            raise InvalidInput(f"{text!r:.42} is not a map's cursor", field="after")
        return cls(*map(int, (text or "0.0").split(".")))


def ends_of(chunks: Iterable[bytes]) -> Iterator[list[End]]:
    """All that a chunk completes; an empty list is a sign of life."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        found, at = [], 0
        while len(buffer) - at >= media.OUTCOME.size:
            kind, name_length, body_length, index, seq, ended = media.OUTCOME.unpack_from(buffer, at)
            name_at = at + media.OUTCOME.size
            start = name_at + name_length
            if len(buffer) < start + body_length:
                break
            at = start + body_length
            if kind != media.OutcomeKind.NOTHING:
                name = buffer[name_at:start].decode("ascii")
                found.append(End(media.OutcomeKind(kind), index, seq, ended, name, bytes(buffer[start:at])))
        del buffer[:at]
        yield found
    if buffer:
        raise GatewayUnavailable("the outcomes broke off in the middle of one")


def patiently(ask: Callable[[], T]) -> T:
    """What `ask` gives, asked again while the gateway is away, or the bus."""
    give_up, pause_s = time.monotonic() + _PATIENCE_S, _SHORTEST_PAUSE_S
    while True:
        try:
            return ask()
        except (GatewayUnavailable, BusUnavailable):
            if time.monotonic() >= give_up:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class InOrder:
    """What came early waits for the items before it; beyond `most_bytes` without its body, to be asked for again."""

    def __init__(self, after: Cursor, most_bytes: int = _MOST_BYTES) -> None:
        self._next = after.item or 0
        self._read = after
        self._early: dict[int, End] = {}
        self._early_bytes = 0
        self._most_bytes = most_bytes
        self._arrived: deque[End] = deque()  # those behind the cursor's `seq`, without bodies

    def add(self, end: End) -> None:
        if end.item < self._next:
            return  # taken before the cursor that we began with
        if end.item != self._next and self._early_bytes + len(end.body) > self._most_bytes:
            end = end._replace(kind=media.OutcomeKind.ELSEWHERE, body=b"")
        self._early[end.item] = end
        self._early_bytes += len(end.body)
        self._arrived.append(end._replace(body=b""))

    def take(self) -> End | None:
        """The next one, if it is there."""
        end = self._early.pop(self._next, None)
        if end is not None:
            self._early_bytes -= len(end.body)
            self._next += 1
            while self._arrived and self._arrived[0].item < self._next:
                arrived = self._arrived.popleft()
                self._read = Cursor(arrived.seq, arrived.ended)
        return end

    def skip(self) -> int | None:
        """Give up the next item, for its end was forgotten; None when nothing waits behind it."""
        if not self._early:
            return None
        self._next += 1
        return self._next - 1

    @property
    def cursor(self) -> Cursor:
        return self._read._replace(item=self._next)


class AsTheyCome:
    """The same for who takes them in the order of their ends."""

    def __init__(self, after: Cursor) -> None:
        self._waiting: deque[End] = deque()
        self._skips_below = after.item or 0
        self.cursor = Cursor(after.seq, after.ended)

    def add(self, end: End) -> None:
        if end.item >= self._skips_below:
            self._waiting.append(end)

    def take(self) -> End | None:
        if not self._waiting:
            return None
        end = self._waiting.popleft()
        self.cursor = Cursor(end.seq, end.ended)
        return end

    def skip(self) -> int | None:
        return None


class Inbox:
    """`read(cursor)` gives the ends behind a cursor; that it ends means that there will be no more."""

    def __init__(self, read: Callable[[str], Iterator[list[End]]], after: Cursor) -> None:
        self._read = read
        self._at = after
        self._lock = threading.Condition()
        self._ends: list[End] = []
        self._bytes = 0
        self.is_over = False  # all ends have come
        self._error: BaseException | None = None
        self._stopped = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpufn-map-ends", daemon=True).start()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """Whoever takes next gets this."""
        with self._lock:
            self._error = self._error or error
            self._lock.notify_all()

    def take(self) -> list[End] | None:
        """Wait for some; None after the last one. Raises what `fail` was told, or why there can be no more."""
        with self._lock:
            while not self._ends:
                if self._error is not None:
                    raise self._error
                if self.is_over or self._stopped:
                    return None
                self._lock.wait()
            ends, self._ends, self._bytes = self._ends, [], 0
            self._lock.notify_all()
            return ends

    def _run(self) -> None:
        give_up, pause_s = math.inf, _SHORTEST_PAUSE_S
        while not self._stopped:
            try:
                with contextlib.closing(self._read(self._at.wire)) as arriving:  # type: ignore[type-var]
                    for ends in arriving:
                        give_up, pause_s = math.inf, _SHORTEST_PAUSE_S
                        if not self._put(ends):
                            return
                with self._lock:
                    self.is_over = True
                    self._lock.notify_all()
                return
            except (GatewayUnavailable, BusUnavailable) as error:
                give_up = min(give_up, time.monotonic() + _PATIENCE_S)
                if time.monotonic() >= give_up:
                    self.fail(error)
                    return
            except Exception as error:
                self.fail(error)
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _put(self, ends: list[End]) -> bool:
        """False when nobody wants more."""
        with self._lock:
            while not self._stopped and (self._bytes > _MOST_BYTES or len(self._ends) > _MOST_ENDS):
                self._lock.wait()
            if ends and not self._stopped:
                self._ends += ends
                self._bytes += sum(len(end.body) for end in ends)
                self._at = Cursor(ends[-1].seq, ends[-1].ended)
                self._lock.notify_all()
            return not self._stopped
