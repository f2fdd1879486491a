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

_MAX_BYTES: Final = 32 << 20  # of outcomes in the reader; and as many of outcomes that wait for an earlier item
_MAX_OUTCOMES: Final = 4096
_RETRY_S: Final = 60.0  # longer than the restart of a gateway takes
_MIN_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 2.0
_CURSOR = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,18}){1,2}")


class ItemOutcome(NamedTuple):
    """The outcome of an item: its result, or a problem as JSON. `seq` and `ended_count` are its `Cursor`."""

    kind: media.MapOutcomeKind
    item: int
    seq: int
    ended_count: int
    content_type: str
    body: bytes


class Cursor(NamedTuple):
    """The position of a reader in a map.

    All outcomes up to `seq` have been taken; their number is `ended_count`. An ordered reader has taken all items below
    `item`.

    >>> str(Cursor(17, 3)), Cursor.parse("17.3.5")
    ('17.3', Cursor(seq=17, ended_count=3, item=5))
    """

    seq: int = 0
    ended_count: int = 0
    item: int | None = None

    def __str__(self) -> str:
        return self.for_gateway if self.item is None else f"{self.for_gateway}.{self.item}"

    @property
    def for_gateway(self) -> str:
        """The part that the gateway accepts: it does not order items."""
        return f"{self.seq}.{self.ended_count}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Return the cursor in `text`. Raises InvalidInput."""
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
            kind, type_length, body_length, item, seq, ended_count = media.OUTCOME.unpack_from(buffer, at)
            type_at = at + media.OUTCOME.size
            body_at = type_at + type_length
            if len(buffer) < body_at + body_length:
                break
            at = body_at + body_length
            if kind != media.MapOutcomeKind.EMPTY:
                content_type = buffer[type_at:body_at].decode("ascii")
                body = bytes(buffer[body_at:at])
                outcomes.append(ItemOutcome(media.MapOutcomeKind(kind), item, seq, ended_count, content_type, body))
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
        self._position = after
        self._early: dict[int, ItemOutcome] = {}
        self._early_bytes = 0
        self._max_bytes = max_bytes
        # In the order of arrival, without bodies. The cursor is before the first, whose item has not been taken.
        self._arrived: deque[ItemOutcome] = deque()

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
                self._position = Cursor(arrived.seq, arrived.ended_count)
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
        return self._position._replace(item=self._next)


class ArrivalOrder:
    """Passes on outcomes in the order of their arrival. Has the interface of ItemOrder."""

    def __init__(self, after: Cursor) -> None:
        self._waiting: deque[ItemOutcome] = deque()
        self._first_item = after.item or 0
        self.cursor = Cursor(after.seq, after.ended_count)

    def add(self, outcome: ItemOutcome) -> None:
        if outcome.item >= self._first_item:
            self._waiting.append(outcome)

    def take(self) -> ItemOutcome | None:
        if not self._waiting:
            return None
        outcome = self._waiting.popleft()
        self.cursor = Cursor(outcome.seq, outcome.ended_count)
        return outcome

    def skip(self) -> int | None:
        return None


class OutcomeReader:
    """Reads outcomes in a thread. `open_stream(cursor)` yields the outcomes after a cursor, to the last one."""

    def __init__(self, open_stream: Callable[[str], Iterator[list[ItemOutcome]]], after: Cursor) -> None:
        self._open_stream = open_stream
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
                with contextlib.closing(self._open_stream(self._cursor.for_gateway)) as stream:  # type: ignore[type-var]
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
                self._cursor = Cursor(outcomes[-1].seq, outcomes[-1].ended_count)
                self._lock.notify_all()
            return not self._stopped
