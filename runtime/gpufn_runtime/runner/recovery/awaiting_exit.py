"""Attempts of one Revision whose worker is lost, until the agent reports how its process ended.

The report also proves that the process is dead; an attempt must not start again before that. For a process, the report
comes within milliseconds. For a container, it comes when Docker has noticed, after seconds on a busy machine. Meanwhile
the runner keeps the attempts: it extends their leases, and lookups find them. Without a report they end when the
process must be dead, or sooner if no caller waits and they are not retried.
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

# After a process closed its socket: time for a killed agent to restart and find what has ended meanwhile.
EXPLAINED_WITHIN_S = END_TOLD_WITHIN_S + 2.0
# After the runner closed the connection to a live process: a worker without a runner looks for one, and then ends
# itself.
ENDS_ITSELF_WITHIN_S = RECONNECT_S + LAST_CALL_S + 2.0


class _Ends(Protocol):
    def with_worker(self, link: WorkerLink, attempts: Iterable[Attempt], exit_: Exit | None) -> None: ...


class _Supervision(Protocol):
    def exit_of(self, worker: str) -> Exit | None: ...
    def on_exit(self, worker: str, callback: Callable[[Exit], None]) -> None: ...
    def forget(self, worker: str) -> None: ...


@dataclass
class _Loss:
    link: WorkerLink
    attempts: list[Attempt]
    deadline: float  # monotonic


class AwaitingExit:
    def __init__(self, finisher: _Ends, agent_events: _Supervision, clock: Clock) -> None:
        self._finisher = finisher
        self._agent_events = agent_events
        self._clock = clock
        self._losses: dict[str, _Loss] = {}

    def __iter__(self) -> Iterator[Attempt]:
        return (attempt for loss in self._losses.values() for attempt in loss.attempts)

    def add(self, link: WorkerLink, attempts: list[Attempt], within_s: float) -> None:
        """Keep the attempts of a lost worker. They end after `within_s` if the agent does not report the exit."""
        self._losses[link.worker] = _Loss(link, attempts, self._clock.monotonic() + within_s)
        self._agent_events.on_exit(link.worker, lambda _: self.end(link.worker))

    def end(self, worker: str) -> None:
        """End the attempts of a worker whose process is dead."""
        if (loss := self._losses.pop(worker, None)) is not None:
            self._agent_events.forget(worker)
            self._finisher.with_worker(loss.link, loss.attempts, self._agent_events.exit_of(worker))

    def drop_all(self) -> None:
        """Drop all attempts without ending them: it is unknown whether their processes are dead. Their messages are
        redelivered after `ack_wait`."""
        for worker in self._losses:
            self._agent_events.forget(worker)
        self._losses.clear()

    def tick(self, now: float, touch: Callable[[Attempt, float], None]) -> bool:
        """Extend leases, and end attempts that need not wait. Returns whether any are left. `now` is monotonic."""
        for worker, loss in list(self._losses.items()):
            ended = [attempt for attempt in loss.attempts if _can_end(attempt, now)]
            loss.attempts = [attempt for attempt in loss.attempts if attempt not in ended]
            self._finisher.with_worker(loss.link, ended, None)
            for attempt in loss.attempts:
                touch(attempt, now)
            if now >= loss.deadline or not loss.attempts:
                self.end(worker)
        return bool(self._losses)


def _can_end(attempt: Attempt, now: float) -> bool:
    """Return whether no caller waits for the attempt any longer and it is not retried."""
    is_late = attempt.run.ending is not None or now >= attempt.run.must_end_at
    return attempt.is_cancelled or (is_late and attempt.link.revision.spec.retries is None)
