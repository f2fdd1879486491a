"""Attempts of one Revision whose worker is lost, until the agent reports how its process ended.

The report is also the proof that the process is dead, and an attempt must not start again before that. The report of
a process comes within milliseconds. That of a container comes when Docker has noticed, after seconds on a busy machine.
Meanwhile the runner keeps the attempts: it touches their deliveries, and `where` finds them. Without a report they end
when the process must be dead, or sooner when nobody waits for them and they do not start again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gpufn_core.domain.worker import END_TOLD_WITHIN_S, Exit
from gpufn_core.protocol.launch import LAST_CALL_S, RECONNECT_S
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.attempts.attempt import Attempt
from gpufn_runtime.runner.workers.worker_link import WorkerLink

# After a process closed its socket: an agent that was killed is back, and has looked at what ended meanwhile.
EXPLAINED_WITHIN_S = END_TOLD_WITHIN_S + 2.0
# After the runner hung up on a process that runs: without a runner it looks for one, and then ends itself.
ENDS_ITSELF_WITHIN_S = RECONNECT_S + LAST_CALL_S + 2.0


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

    def add(self, link: WorkerLink, attempts: list[Attempt], within_s: float) -> None:
        """Keep the attempts of a worker that has just been lost. They end after `within_s` if the agent does not report
        the exit."""
        self._losses[link.worker] = _Loss(link, attempts, self._clock.monotonic() + within_s)
        self._supervision.when_ended(link.worker, lambda _: self.end(link.worker))

    def end(self, worker: str) -> None:
        """End its attempts: its process is dead."""
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
        """Touch them, and end those that need not wait. Return whether any is left; `now` is monotonic."""
        for worker, loss in list(self._losses.items()):
            over = [each for each in loss.attempts if _is_over(each, now)]
            loss.attempts = [each for each in loss.attempts if each not in over]
            self._ends.with_worker(loss.link, over, None)
            for attempt in loss.attempts:
                touch(attempt, now)
            if now >= loss.until or not loss.attempts:
                self.end(worker)
        return bool(self._losses)


def _is_over(attempt: Attempt, now: float) -> bool:
    """Nobody waits for it any longer, and it does not start again."""
    is_late = attempt.run.ending is not None or now >= attempt.run.must_end_at
    return attempt.is_cancelled or (is_late and attempt.link.revision.spec.retries is None)
