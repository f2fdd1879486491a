"""Reports of the reasons why calls wait, in one thread for all calls of a process.

1. `watching` notes the start of a call and removes it at the end, which is all that a quick call costs.
2. A thread queries the gateway for calls that last longer than `first_s`.
3. `show` receives each response. `ReasonLines` makes a line of each new reason.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from gpufn_core.errors import GpufnError

if TYPE_CHECKING:
    from gpufn.client.call_api import CallApi
    from gpufn_core.protocol.reports import Waiting

FIRST_S: Final = 2.0
_LONGEST_S: Final = 8.0  # between two queries about a long call
_AT_A_TIME: Final = 4  # subjects that are queried per round: one line says enough about a thousand calls
_REPEAT_S: Final = 60.0
_JOIN_S: Final = 1.0


class Subject(NamedTuple):
    """A function, a submitted call or a map that a caller waits for. Calls of one function are one subject."""

    kind: str
    id: str

    def query(self, client: CallApi) -> tuple[str, Waiting | None]:
        """Return the name for the report, and the reason for the wait."""
        if self.kind == "call":
            call = client.invocation(self.id)
            return call.function, call.waiting
        name = client.map(self.id).function if self.kind == "map" else self.id
        return name, client.why(name).waiting


class WaitReports:
    """Queries the reasons for waits that last, and passes each response to `show`."""

    def __init__(
        self,
        client: Callable[[], CallApi],
        show: Callable[[str, Waiting | None], None],
        *,
        first_s: float = FIRST_S,
        longest_s: float = _LONGEST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._show = show
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: dict[object, tuple[Subject, float]] = {}  # the oldest first
        self._next: dict[Subject, tuple[float, float]] = {}  # time of the next query, and the period after it
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @contextlib.contextmanager
    def watching(self, subject: Subject) -> Iterator[None]:
        """Report the reason for the wait until the block ends."""
        token = object()
        with self._lock:
            self._begun[token] = subject, self._clock()
            if self._thread is None or not self._thread.is_alive():  # a forked process has no threads
                self._thread = threading.Thread(target=self._run, args=(self._closed,), name="gpufn-waits", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._begun[token]

    def close(self) -> None:
        """End the thread, since the client may be closed after this. A later call starts another one."""
        self._closed.set()
        if (thread := self._thread) is not None:
            thread.join(_JOIN_S)
        self._closed = threading.Event()

    def poll(self, now: float) -> None:
        """Query once about each subject that is due."""
        for subject in self._due(now):
            _, period_s = self._next.get(subject, (now, self._first_s / 2))
            self._next[subject] = now + period_s, min(self._longest_s, period_s * 2)
            try:
                name, waiting = subject.query(self._client())
            except GpufnError:  # the call itself reports the fault
                self._next[subject] = float("inf"), period_s
                continue
            with self._lock:
                still_waits = any(each == subject for each, _ in self._begun.values())
            if still_waits:
                self._show(name, waiting)

    def _due(self, now: float) -> list[Subject]:
        begun: dict[Subject, float] = {}
        with self._lock:
            for subject, started in self._begun.values():
                begun.setdefault(subject, started)
        self._next = {subject: value for subject, value in self._next.items() if subject in begun}
        waits = [subject for subject, started in begun.items() if now - started >= self._first_s]
        return [subject for subject in waits[:_AT_A_TIME] if now >= self._next.get(subject, (0.0, 0.0))[0]]

    def _run(self, closed: threading.Event) -> None:
        while not closed.wait(self._first_s / 2):
            with self._lock:
                if not self._begun:
                    self._thread = None
                    return
            try:
                self.poll(self._clock())
            except Exception:
                if not closed.is_set():  # the client may be closed under a query
                    raise


class ReasonLines:
    """Writes a line for each new reason of a function. The same reason is repeated after a minute at the earliest."""

    def __init__(self, write: Callable[[str], object], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._last: dict[str, tuple[str, float]] = {}

    def __call__(self, name: str, waiting: Waiting | None) -> None:
        if waiting is None:
            return
        now = self._clock()
        reason, at = self._last.get(name, ("", 0.0))
        if waiting.reason != reason or now - at >= _REPEAT_S:
            self._last[name] = waiting.reason, now
            self._write(f"{name} is waiting: {waiting.detail}")
