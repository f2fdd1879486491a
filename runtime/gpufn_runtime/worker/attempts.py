"""The Attempts that this worker holds, from their Run to their Result.

QUEUED → RUNNING → ended;  QUEUED → ended (cancelled, or its link is gone)

Whoever ends an attempt here sends its one Result; everybody else's is dropped. Safe from all threads.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from gpufn._context import Context
from gpufn.errors import ArtifactUnavailable, InvalidInput, ProtocolMismatch
from gpufn.parcels import Parcels
from gpufn.protocol.frames import Run


class State(enum.Enum):
    QUEUED = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


class Attempt:
    """One Run. `link` counts connections to the runner: numbers are unique within one."""

    __slots__ = ("_body", "_parcels", "cancel_requested", "context", "credits", "link", "on_change", "run", "state")

    def __init__(self, run: Run, body: bytes, link: int, parcels: Parcels) -> None:
        self.run = run
        self._body = body
        self._parcels = parcels
        self.link = link
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
        self._stale = 0  # still running for a link that is gone
        self.on_idle: Callable[[], None] = lambda: None
        self.on_stale_end: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        return not self._held and not self._stale

    @property
    def stale(self) -> int:
        """How many still run for a link that is gone."""
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

    def end(self, attempt: Attempt) -> bool:
        """True when the caller may send its Result: it had not ended, and its link is still there."""
        with self._lock:
            if attempt.state is State.ENDED:
                return False
            attempt.state = State.ENDED
            ours = self._held.get(attempt.run.attempt) is attempt
            if ours:
                del self._held[attempt.run.attempt]
            else:
                self._stale -= 1
        if not ours:
            self.on_stale_end()
        return ours

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

    def abandon(self) -> None:
        """The link is gone: what is queued never runs here, streams end, what runs ends unheard."""
        with self._lock:
            held = list(self._held.values())
            self._held.clear()
            for attempt in held:
                if attempt.state is State.QUEUED:
                    attempt.state = State.ENDED
                    attempt.drop_body()
                else:
                    attempt.cancel_requested = True
                    self._stale += 1
        for attempt in held:
            if attempt.on_change is not None:
                attempt.on_change()
