"""The Attempts of this worker, from Run to Result.

QUEUED → RUNNING → ended;  QUEUED → ended (cancelled, or its link was lost)

The code that ends an attempt here sends its only Result; later Results are dropped. Attempts that run when the link is
lost may be adopted by the next runner: a Result that is ready before then is kept. Streams, cancelled attempts, and
attempts that waited for an answer of the lost runner cannot be adopted: they are stale, and their Result is not sent.
Thread-safe.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Collection

import msgspec

from gpufn.call.context import Context
from gpufn_core.errors import ArtifactUnavailable, InvalidInput, ProtocolMismatch
from gpufn_core.protocol.frames import Run, Unfinished
from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW, UnreadItems
from gpufn_platform.shared_bodies.bodies import SharedBodies


class State(enum.Enum):
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


# Each call needs these, and Python looks up a member of an enum slowly.
_QUEUED, _RUNNING, _ENDED = State.QUEUED, State.RUNNING, State.ENDED

OnBegin = Callable[["Attempt", bytes | memoryview], None]


class Attempt(msgspec.Struct, eq=False):
    """One Run. `link` is the number of the connection to the runner: attempt numbers are unique within a connection."""

    run: Run
    body: bytes  # until `take_body`
    link: int
    shared_bodies: SharedBodies
    credits: int
    received_at: float  # monotonic
    result: bytes = b""  # encoded Result, if the attempt ended without a link
    state: State = _QUEUED
    cancel_requested: bool = False
    on_change: Callable[[], None] | None = None  # called after a Cancel or a Credit
    on_input: Callable[[int, bytes], None] | None = None  # of a web session: called with each event of its input
    context: Context | None = None  # returned by `gpufn.current()`
    on_begin: OnBegin | None = None
    live_bytes: int = 0  # sent as LiveItems
    items: int = 0  # of a stream, sent
    unread: UnreadItems = msgspec.field(default_factory=UnreadItems)

    def take_body(self) -> bytes | memoryview:
        """Return the input; call once. Raises InvalidInput if it was a shared body that no longer exists."""
        body: bytes | memoryview = self.body
        self.body = b""
        if self.run.shared_body:
            try:
                body = self.shared_bodies.take(self.run.shared_body)
            except ArtifactUnavailable as error:
                raise InvalidInput(error.message) from error
        if self.on_begin is not None:
            self.on_begin(self, body)
        return body

    @property
    def may_send_item(self) -> bool:
        """True if the reader of the stream has room for another item."""
        self.unread.read_until(self.credits - STREAM_WINDOW)  # the first credit came before any was read
        return self.items < self.credits and self.unread.has_room

    @property
    def can_be_adopted(self) -> bool:
        return bool(self.run.delivery) and not self.run.stream and not self.cancel_requested

    def drop_body(self) -> None:
        """Discard the input of an attempt that will not run."""
        if self.run.shared_body:
            self.shared_bodies.remove(self.run.shared_body)

    def __repr__(self) -> str:
        return f"Attempt({self.run.attempt}, {self.state.name})"


class Attempts:
    def __init__(self, shared_bodies: SharedBodies) -> None:
        self._shared_bodies = shared_bodies
        self._lock = threading.Lock()
        self._active: dict[int, Attempt] = {}
        self._unsent: list[Attempt] = []  # ended without a link
        self._is_cut = False  # there is no link
        self._reported_link = 1  # the link on which the active attempts were, or are being, reported
        self._stale = 0  # attempts still running for a lost link; their Results are not sent
        self.on_idle: Callable[[], None] = lambda: None
        self.on_stale_end: Callable[[], None] = lambda: None
        self.on_begin: OnBegin | None = None  # called with each attempt's input, before it is decoded

    @property
    def idle(self) -> bool:
        return not self._active and not self._stale

    @property
    def count(self) -> int:
        return len(self._active) + self._stale

    def add(self, run: Run, body: bytes, link: int) -> Attempt:
        attempt = Attempt(run, body, link, self._shared_bodies, run.credits, time.monotonic(), on_begin=self.on_begin)
        with self._lock:
            if run.attempt in self._active:
                raise ProtocolMismatch(f"attempt {run.attempt} was sent twice")
            self._active[run.attempt] = attempt
        return attempt

    def start(self, attempt: Attempt) -> bool:
        """Mark as running. Returns False if the attempt has ended in the queue."""
        with self._lock:
            if attempt.state is not _QUEUED:
                return False
            attempt.state = _RUNNING
            return True

    def end(self, attempt: Attempt, result: bytes) -> bool:
        """Mark as ended. Returns True if the caller must send `result`: not ended before, and the link is up."""
        with self._lock:
            if attempt.state is _ENDED:
                return False
            attempt.state = _ENDED
            is_active = self._active.get(attempt.run.attempt) is attempt
            if is_active:
                del self._active[attempt.run.attempt]
                if self._is_cut:
                    attempt.result = result
                    self._unsent.append(attempt)
                    return False
            else:
                self._stale -= 1
        if not is_active:
            self.on_stale_end()
        return is_active

    def keep(self, attempt: Attempt, result: bytes) -> None:
        """Keep a Result that could not be sent: the runner had disconnected unnoticed."""
        with self._lock:
            if attempt.link == self._reported_link and attempt.can_be_adopted:
                attempt.result = result
                self._unsent.append(attempt)

    def check_idle(self) -> None:
        """Call `on_idle` if no attempt is left. Not part of `end`, because the Result must be sent first."""
        if self.idle:
            self.on_idle()

    def cancel(self, number: int) -> Attempt | None:
        """Cancel an attempt. Returns it if it was queued: then it has ended, and the caller sends its Result."""
        with self._lock:
            attempt = self._active.get(number)
            if attempt is None:
                return None
            attempt.cancel_requested = True
            if attempt.state is _QUEUED:
                attempt.state = _ENDED
                del self._active[number]
                attempt.drop_body()
                return attempt
            on_change = attempt.on_change
        if on_change is not None:
            on_change()
        return None

    def credit(self, number: int, items: int) -> None:
        with self._lock:
            attempt = self._active.get(number)
            if attempt is None:
                return
            attempt.credits += items
            on_change = attempt.on_change
        if on_change is not None:
            on_change()

    def take_input(self, number: int, event: int, payload: bytes) -> None:
        """Pass an event of its input to an attempt."""
        with self._lock:
            attempt = self._active.get(number)
        if attempt is not None and attempt.on_input is not None:
            attempt.on_input(event, payload)

    def abandon(self, unanswered: Collection[Attempt | None]) -> list[Attempt]:
        """The link is lost: drop queued attempts, and make those stale that cannot be adopted. Return both.

        `unanswered`: attempts that waited for a response of the lost runner. If it contains None, these attempts are
        unknown, so all become stale.
        """
        with self._lock:
            self._is_cut = True
            active = list(self._active.values())
            abandoned = [
                attempt for attempt in active
                if attempt.state is _QUEUED or None in unanswered or attempt in unanswered
                or not attempt.can_be_adopted
            ]  # fmt: skip
            for attempt in abandoned:
                del self._active[attempt.run.attempt]
                if attempt.state is _QUEUED:
                    attempt.state = _ENDED
                    attempt.drop_body()
                else:
                    attempt.cancel_requested = True
                    self._stale += 1
        for attempt in abandoned:
            if attempt.on_change is not None:
                attempt.on_change()
        return abandoned

    def leftovers(self) -> tuple[int, tuple[Unfinished, ...]]:
        """Report to the next runner: the number of stale attempts, and the attempts that it may adopt."""
        now = time.monotonic()
        with self._lock:
            self._reported_link += 1
            return self._stale, tuple(
                Unfinished(run.attempt, run.invocation, run.delivery, now - attempt.received_at, run.number)
                for attempt in (*self._active.values(), *self._unsent)
                for run in (attempt.run,)
            )

    def resume(self, link: int) -> list[bytes]:
        """Resume with a new link, whose runner knows the leftovers; returns the Results that were not sent."""
        with self._lock:
            self._is_cut = False
            for attempt in self._active.values():
                attempt.link = link
            unsent, self._unsent = self._unsent, []
            return [attempt.result for attempt in unsent]
