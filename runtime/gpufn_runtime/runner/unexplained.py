"""Attempts of one Revision whose worker is gone, until the agent has said how it ended: their callers are told that.

Of a process it is known within milliseconds, of a container when Docker has noticed, which on a busy machine takes
seconds. Meanwhile they are still ours: touched, found by who asks where they are, and ended without a reason when
nobody would wait for it any longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gpufn.clock import Clock
from gpufn.workers import END_TOLD_WITHIN_S, Exit
from gpufn_runtime.runner.attempt import Attempt
from gpufn_runtime.runner.worker_link import WorkerLink

_EXPLAIN_S = END_TOLD_WITHIN_S + 2.0  # an agent that was killed is back, and has looked at what ended meanwhile


class _Ends(Protocol):
    def with_worker(self, link: WorkerLink, attempts: Iterable[Attempt], exit_: Exit | None) -> None: ...


class _Supervision(Protocol):
    def exit_of(self, worker: str) -> Exit | None: ...
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

    def __iter__(self) -> Iterator[Attempt]:
        return (attempt for loss in self._losses.values() for attempt in loss.attempts)

    def add(self, link: WorkerLink, attempts: list[Attempt]) -> None:
        """What ran in a worker that has just been lost."""
        self._losses[link.worker] = _Loss(link, attempts, self._clock.monotonic() + _EXPLAIN_S)
        self._supervision.when_ended(link.worker, lambda _: self.end(link.worker))

    def end(self, worker: str) -> None:
        """What is known of it now is all that anybody will say."""
        if (loss := self._losses.pop(worker, None)) is not None:
            self._supervision.forget(worker)
            self._ends.with_worker(loss.link, loss.attempts, self._supervision.exit_of(worker))

    def leave_all(self) -> None:
        """To whoever receives their messages next: nobody here will know whether their processes are dead. The bus
        delivers them again when `ack_wait` is over."""
        for worker in self._losses:
            self._supervision.forget(worker)
        self._losses.clear()

    def tick(self, now: float, touch: Callable[[Attempt, float], None]) -> bool:
        """Touch them, and end what waits no longer. Whether any is left; `now` is monotonic."""
        for worker, loss in list(self._losses.items()):
            over = [each for each in loss.attempts if each.run.ending is not None or now >= each.run.must_end_at]
            loss.attempts = [each for each in loss.attempts if each not in over]
            self._ends.with_worker(loss.link, over, None)
            for attempt in loss.attempts:
                touch(attempt, now)
            if now >= loss.until or not loss.attempts:
                self.end(worker)
        return bool(self._losses)
