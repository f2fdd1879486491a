"""The Attempts that this worker holds, from their Run to their Result.

QUEUED → RUNNING → ended;  QUEUED → ended (cancelled, or its link is gone)

Whoever ends an attempt here sends its one Result; everybody else's is dropped. What runs while the link goes is for the
next runner, which may adopt it: a Result that comes in between is kept until then. Not so a stream, what was cancelled,
and what waited for an answer of the runner that is gone: it is stale, and ends unheard. Safe from all threads.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Collection

from gpufn.call.context import Context
from gpufn_core.errors import ArtifactUnavailable, InvalidInput, ProtocolMismatch
from gpufn_core.protocol.frames import Run, Unfinished
from gpufn_platform.shared_bodies.bodies import Parcels


class State(enum.Enum):
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Attempt:
    """One Run. `link` counts connections to the runner: numbers are unique within one."""

    __slots__ = (
        "_body",
        "_parcels",
        "came_at",
        "cancel_requested",
        "context",
        "credits",
        "link",
        "on_change",
        "result",
        "run",
        "state",
    )

    def __init__(self, run: Run, body: bytes, link: int, parcels: Parcels) -> None:
        self.run = run
        self._body = body
        self._parcels = parcels
        self.link = link
        self.came_at = time.monotonic()
        self.result = b""  # packed, of one that ended while there was no link
        self.state = State.QUEUED
        self.credits = run.credits
        self.cancel_requested = False
        self.on_change: Callable[[], None] | None = None  # called when a Cancel or a Credit came
        self.context: Context | None = None  # what `gpufn.current()` gave it

    def take_body(self) -> bytes | memoryview:
        """The input; once. Raises InvalidInput when it was a parcel that is gone."""
        if self.run.parcel:
            try:
                return self._parcels.take(self.run.parcel)
            except ArtifactUnavailable as error:
                raise InvalidInput(error.message) from error
        body, self._body = self._body, b""
        return body

    @property
    def can_be_adopted(self) -> bool:
        return bool(self.run.delivery) and not self.run.stream and not self.cancel_requested

    def drop_body(self) -> None:
        """It will not be taken."""
        if self.run.parcel:
            self._parcels.remove(self.run.parcel)

    def __repr__(self) -> str:
        return f"Attempt({self.run.attempt}, {self.state.name})"


class Attempts:
    def __init__(self, parcels: Parcels) -> None:
        self._parcels = parcels
        self._lock = threading.Lock()
        self._held: dict[int, Attempt] = {}
        self._unsent: list[Attempt] = []  # ended while there was no link
        self._is_cut = False  # there is no link
        self._told = 1  # the link that knows of what is held, or will in a moment
        self._stale = 0  # still running for a link that is gone
        self.on_idle: Callable[[], None] = lambda: None
        self.on_stale_end: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        return not self._held and not self._stale

    @property
    def stale(self) -> int:
        """How many still run for a link that is gone, and nobody will hear of them."""
        return self._stale

    @property
    def count(self) -> int:
        return len(self._held) + self._stale

    def add(self, run: Run, body: bytes, link: int) -> Attempt:
        attempt = Attempt(run, body, link, self._parcels)
        with self._lock:
            if run.attempt in self._held:
                raise ProtocolMismatch(f"attempt {run.attempt} was given twice")
            self._held[run.attempt] = attempt
        return attempt

    def start(self, attempt: Attempt) -> bool:
        """False when it has ended in the queue."""
        with self._lock:
            if attempt.state is not State.QUEUED:
                return False
            attempt.state = State.RUNNING
            return True

    def end(self, attempt: Attempt, result: bytes) -> bool:
        """True when the caller may send its Result, packed here: it had not ended, and its link is still there."""
        with self._lock:
            if attempt.state is State.ENDED:
                return False
            attempt.state = State.ENDED
            ours = self._held.get(attempt.run.attempt) is attempt
            if ours:
                del self._held[attempt.run.attempt]
                if self._is_cut:
                    attempt.result = result
                    self._unsent.append(attempt)
                    return False
            else:
                self._stale -= 1
        if not ours:
            self.on_stale_end()
        return ours

    def keep(self, attempt: Attempt, result: bytes) -> None:
        """Its Result could not be sent: the runner had gone, and nobody had noticed."""
        with self._lock:
            if attempt.link == self._told and attempt.can_be_adopted:
                attempt.result = result
                self._unsent.append(attempt)

    def check_idle(self) -> None:
        """Say so when nothing is left. Apart from `end`, so that the Result is sent before the process ends."""
        if self.idle:
            self.on_idle()

    def cancel(self, number: int) -> Attempt | None:
        """The attempt, when it was still queued: it has ended now, and the caller sends its Result."""
        with self._lock:
            attempt = self._held.get(number)
            if attempt is None:
                return None
            attempt.cancel_requested = True
            if attempt.state is State.QUEUED:
                attempt.state = State.ENDED
                del self._held[number]
                attempt.drop_body()
                return attempt
            on_change = attempt.on_change
        if on_change is not None:
            on_change()
        return None

    def credit(self, number: int, items: int) -> None:
        with self._lock:
            attempt = self._held.get(number)
            if attempt is None:
                return
            attempt.credits += items
            on_change = attempt.on_change
        if on_change is not None:
            on_change()

    def abandon(self, unanswered: Collection[Attempt | None]) -> None:
        """The link is gone: what is queued never runs here, and what cannot be adopted ends unheard. `unanswered` have
        lost what they waited for; None is who cannot be told from the others."""
        with self._lock:
            self._is_cut = True
            held = list(self._held.values())
            goes_on = set() if None in unanswered else {each for each in held if each.can_be_adopted} - set(unanswered)
            given_up = [each for each in held if each not in goes_on or each.state is State.QUEUED]
            for attempt in given_up:
                del self._held[attempt.run.attempt]
                if attempt.state is State.QUEUED:
                    attempt.state = State.ENDED
                    attempt.drop_body()
                else:
                    attempt.cancel_requested = True
                    self._stale += 1
        for attempt in given_up:
            if attempt.on_change is not None:
                attempt.on_change()

    def left(self) -> tuple[int, tuple[Unfinished, ...]]:
        """For the next runner, which is told so: how many are stale, and what it may adopt."""
        now = time.monotonic()
        with self._lock:
            self._told += 1
            return self._stale, tuple(
                Unfinished(
                    each.run.attempt, each.run.invocation, each.run.delivery, now - each.came_at, each.run.number
                )
                for each in (*self._held.values(), *self._unsent)
            )

    def resume(self, link: int) -> list[bytes]:
        """There is a link again, and it knows what is `left`; the Results that it has missed."""
        with self._lock:
            self._is_cut = False
            for attempt in self._held.values():
                attempt.link = link
            unsent, self._unsent = self._unsent, []
            return [attempt.result for attempt in unsent]
