"""Reader of the outcomes of a map's items, which a gateway streams.

parse_outcomes           parses the records of `media.OUTCOMES`
ItemOrder                sorts outcomes into the order of the items, with bounded memory
retry_while_unavailable  repeats a request while the gateway is unavailable
OutcomeReader            reads outcomes in a thread, and resumes after the last one when the connection breaks
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

_MAX_BYTES: Final = 32 << 20  # for outcomes not yet taken, and again for outcomes that wait for an earlier item
_MAX_OUTCOMES: Final = 4096
_RETRY_S: Final = 60.0  # longer than the restart of a gateway takes
_MIN_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 2.0
_CURSOR = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,18}){1,2}")


class ItemOutcome(NamedTuple):
    """The outcome of an item: its result, or a problem as JSON. `seq` and `ended` are its position in the stream."""

    kind: media.MapOutcomeKind
    item: int
    seq: int
    ended: int
    content_type: str
    body: bytes


class Cursor(NamedTuple):
    """The position of a reader in a map.

    All outcomes up to `seq` have been taken; their number is `ended`. An ordered reader has taken all items below
    `item`.

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
        """The cursor that the gateway accepts."""
        return f"{self.seq}.{self.ended}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Parse a cursor. Raises InvalidInput."""
        if not isinstance(text, str) or _CURSOR.fullmatch(text or "0.0") is None:
            raise InvalidInput(f"{text!r:.42} is not a map's cursor", field="after")
        return cls(*map(int, (text or "0.0").split(".")))


def parse_outcomes(chunks: Iterable[bytes]) -> Iterator[list[ItemOutcome]]:
    """Yield the outcomes that each chunk completes. An empty list shows that the connection is alive."""
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        outcomes, at = [], 0
        while len(buffer) - at >= media.OUTCOME.size:
            kind, name_length, body_length, index, seq, ended = media.OUTCOME.unpack_from(buffer, at)
            name_at = at + media.OUTCOME.size
            start = name_at + name_length
            if len(buffer) < start + body_length:
                break
            at = start + body_length
            if kind != media.MapOutcomeKind.EMPTY:
                name = buffer[name_at:start].decode("ascii")
                outcomes.append(
                    ItemOutcome(media.MapOutcomeKind(kind), index, seq, ended, name, bytes(buffer[start:at]))
                )
        del buffer[:at]
        yield outcomes
    if buffer:
        raise GatewayUnavailable("the stream of outcomes broke off inside a record")


def retry_while_unavailable(request: Callable[[], T]) -> T:
    """Return the result of `request`, which is repeated while the gateway or the bus is unavailable."""
    deadline, backoff_s = time.monotonic() + _RETRY_S, _MIN_BACKOFF_S
    while True:
        try:
            return request()
        except (GatewayUnavailable, BusUnavailable):
            if time.monotonic() >= deadline:
                raise
        time.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)


class ItemOrder:
    """Sorts outcomes into the order of the items.

    An early outcome waits for the items before it. Beyond `max_bytes` it waits without its body, which must be
    requested again.
    """

    def __init__(self, after: Cursor, max_bytes: int = _MAX_BYTES) -> None:
        self._next = after.item or 0
        self._read = after
        self._early: dict[int, ItemOutcome] = {}
        self._early_bytes = 0
        self._max_bytes = max_bytes
        self._arrived: deque[ItemOutcome] = deque()  # outcomes after the `seq` of the cursor, without bodies

    def add(self, outcome: ItemOutcome) -> None:
        if outcome.item < self._next:
            return  # taken before the initial cursor
        if outcome.item != self._next and self._early_bytes + len(outcome.body) > self._max_bytes:
            outcome = outcome._replace(kind=media.MapOutcomeKind.BY_REFERENCE, body=b"")
        self._early[outcome.item] = outcome
        self._early_bytes += len(outcome.body)
        self._arrived.append(outcome._replace(body=b""))

    def take(self) -> ItemOutcome | None:
        """Return the next outcome, or None if it has not arrived."""
        outcome = self._early.pop(self._next, None)
        if outcome is not None:
            self._early_bytes -= len(outcome.body)
            self._next += 1
            while self._arrived and self._arrived[0].item < self._next:
                arrived = self._arrived.popleft()
                self._read = Cursor(arrived.seq, arrived.ended)
        return outcome

    def skip(self) -> int | None:
        """Skip the next item, whose outcome is no longer stored, and return its index.

        Return None if no later outcome has arrived.
        """
        if not self._early:
            return None
        self._next += 1
        return self._next - 1

    @property
    def cursor(self) -> Cursor:
        return self._read._replace(item=self._next)


class ArrivalOrder:
    """Passes on outcomes in the order of their arrival. Has the interface of ItemOrder."""

    def __init__(self, after: Cursor) -> None:
        self._waiting: deque[ItemOutcome] = deque()
        self._first_item = after.item or 0
        self.cursor = Cursor(after.seq, after.ended)

    def add(self, outcome: ItemOutcome) -> None:
        if outcome.item >= self._first_item:
            self._waiting.append(outcome)

    def take(self) -> ItemOutcome | None:
        if not self._waiting:
            return None
        outcome = self._waiting.popleft()
        self.cursor = Cursor(outcome.seq, outcome.ended)
        return outcome

    def skip(self) -> int | None:
        return None


class OutcomeReader:
    """Reads outcomes in a thread. `read(cursor)` yields the outcomes after a cursor, and returns after the last one."""

    def __init__(self, read: Callable[[str], Iterator[list[ItemOutcome]]], after: Cursor) -> None:
        self._read = read
        self._cursor = after
        self._lock = threading.Condition()
        self._outcomes: list[ItemOutcome] = []
        self._bytes = 0
        self.is_over = False  # all outcomes have arrived
        self._error: BaseException | None = None
        self._stopped = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpufn-map-ends", daemon=True).start()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make the next `take` raise `error`."""
        with self._lock:
            self._error = self._error or error
            self._lock.notify_all()

    def take(self) -> list[ItemOutcome] | None:
        """Wait for outcomes. Return None after the last one. Raises the error of `fail` or of the reader."""
        with self._lock:
            while not self._outcomes:
                if self._error is not None:
                    raise self._error
                if self.is_over or self._stopped:
                    return None
                self._lock.wait()
            outcomes, self._outcomes, self._bytes = self._outcomes, [], 0
            self._lock.notify_all()
            return outcomes

    def _run(self) -> None:
        deadline, backoff_s = math.inf, _MIN_BACKOFF_S
        while not self._stopped:
            try:
                with contextlib.closing(self._read(self._cursor.wire)) as stream:  # type: ignore[type-var]
                    for outcomes in stream:
                        deadline, backoff_s = math.inf, _MIN_BACKOFF_S
                        if not self._put(outcomes):
                            return
                with self._lock:
                    self.is_over = True
                    self._lock.notify_all()
                return
            except (GatewayUnavailable, BusUnavailable) as error:
                deadline = min(deadline, time.monotonic() + _RETRY_S)
                if time.monotonic() >= deadline:
                    self.fail(error)
                    return
            except Exception as error:
                self.fail(error)
                return
            time.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _put(self, outcomes: list[ItemOutcome]) -> bool:
        """Wait for room, and add outcomes. Return False if the reader was stopped."""
        with self._lock:
            while not self._stopped and (self._bytes > _MAX_BYTES or len(self._outcomes) > _MAX_OUTCOMES):
                self._lock.wait()
            if outcomes and not self._stopped:
                self._outcomes += outcomes
                self._bytes += sum(len(outcome.body) for outcome in outcomes)
                self._cursor = Cursor(outcomes[-1].seq, outcomes[-1].ended)
                self._lock.notify_all()
            return not self._stopped
