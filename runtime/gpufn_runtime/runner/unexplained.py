"""Attempts of one Revision whose worker is gone, until the agent has said how it ended: their callers are told that.

Of a process it is known within milliseconds, of a container when Docker has noticed, which on a busy machine takes
seconds. Meanwhile they are still ours: touched, found by who asks where they are, and ended when their time is over
or nobody wants them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from gpufn.clock import Clock
from gpufn.invocation import OutcomeKind
from gpufn.workers import Exit
from gpufn_runtime.runner.attempt import Attempt
from gpufn_runtime.runner.worker_link import WorkerLink

_EXPLAIN_S = 10.0  # an agent that was killed is back, and has looked at what ended meanwhile


class _Ends(Protocol):
    def begin(self, attempt: Attempt, kind: OutcomeKind, now: float) -> None: ...
    def with_worker(self, link: WorkerLink, attempts: Iterable[Attempt], exit_: Exit | None) -> None: ...


class _Supervision(Protocol):
    def when_ended(self, worker: str, tell: Callable[[Exit], None]) -> None: ...
    def forget(self, worker: str) -> None: ...


@dataclass
class _Loss:
    link: WorkerLink
    attempts: list[Attempt]
    until: float  # monotonic


class Unexplained:
    def __init__(self, ends: _Ends, supervision: _Supervision, clock: Clock) -> None:
        self._ends = ends
        self._supervision = supervision
        self._clock = clock
        self._losses: dict[str, _Loss] = {}

    def add(self, link: WorkerLink, attempts: Iterable[Attempt]) -> None:
        """Of a worker that has just been lost; one that came back may be lost again."""
        if (loss := self._losses.get(link.worker)) is not None:
            loss.attempts.extend(attempts)
            return
        self._losses[link.worker] = _Loss(link, list(attempts), self._clock.monotonic() + _EXPLAIN_S)
        self._supervision.when_ended(link.worker, lambda exit_: self.end(link.worker, exit_))

    def end(self, worker: str, exit_: Exit | None) -> None:
        """It is known now, or nobody will ever say."""
        if (loss := self._losses.pop(worker, None)) is not None:
            self._supervision.forget(worker)
            self._ends.with_worker(loss.link, loss.attempts, exit_)

    def tick(self, now: float, touch: Callable[[Attempt, float], None]) -> bool:
        """Touch them, and end what waits no longer. Whether any is left; `now` is monotonic."""
        for worker, loss in list(self._losses.items()):
            for attempt in loss.attempts:
                if now >= attempt.must_end_at:
                    self._ends.begin(attempt, OutcomeKind.TIMED_OUT, now)
                touch(attempt, now)
            decided = [attempt for attempt in loss.attempts if attempt.ending is not None]
            loss.attempts = [attempt for attempt in loss.attempts if attempt.ending is None]
            self._ends.with_worker(loss.link, decided, None)
            if now >= loss.until or not loss.attempts:
                self.end(worker, None)
        return bool(self._losses)
