"""Attempts of lost workers, until their processes are known to be dead. Pure.

A call must not start again while its process may still run. So its attempt waits for the agent's report of the exit, or
until that report is overdue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from gpufn_core.domain.worker import Exit
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import Attempt, AttemptState
from gpufn_runtime.runner.core.end_rules import worker_exit_error
from gpufn_runtime.runner.core.ends import Ends
from gpufn_runtime.runner.core.step import Step
from gpufn_runtime.runner.core.views import WorkerView


class _Loss(msgspec.Struct):
    """Attempts of one lost worker, until the report of its exit or `until` (monotonic)."""

    worker: WorkerView
    attempts: list[Attempt]
    until: float


class LostWorkers:
    """`losses` are the lost workers whose attempts still wait, by id."""

    def __init__(self, spec: FunctionSpec, step: Step, ends: Ends) -> None:
        self._spec = spec
        self._step = step
        self._ends = ends
        self.losses: dict[str, _Loss] = {}

    def attempts(self) -> Iterator[Attempt]:
        for loss in self.losses.values():
            yield from loss.attempts

    def on_lost(self, event: events.WorkerLost) -> None:
        """Let the attempts of a worker wait for its exit."""
        worker, now = event.worker, self._step.now.monotonic
        lost = list(worker.attempts.values())
        if not lost:
            return
        worker.attempts.clear()
        for attempt in lost:
            attempt.move(AttemptState.LOST)
            attempt.run.lost_at = now
            self._ends.stop_counting(attempt)
        self.losses[worker.id] = _Loss(worker, lost, now + event.explained_within_s)
        self._step.emit(actions.AwaitExit(worker.id))

    def on_exit(self, worker_id: str, exit_: Exit | None) -> None:
        """End the attempts of a worker. `exit_` is None if its report is overdue."""
        if (loss := self.losses.pop(worker_id, None)) is not None:
            self._step.emit(actions.StopAwaiting(worker_id))
            self._end(loss.worker, loss.attempts, exit_)

    def tick(self, cutoff: float) -> None:
        for loss in list(self.losses.values()):
            over = [each for each in loss.attempts if self._may_end_early(each, cutoff)]
            loss.attempts = [each for each in loss.attempts if each not in over]
            self._end(loss.worker, over, None)
            for attempt in loss.attempts:
                self._step.touch(attempt)
            if cutoff >= loss.until or not loss.attempts:
                self.on_exit(loss.worker.id, None)

    def forget(self) -> None:
        """Leave the calls to NATS, which redelivers them: this runner will not know whether their processes are
        dead."""
        for worker_id in self.losses:
            self._step.emit(actions.StopAwaiting(worker_id))
        self.losses.clear()

    def _may_end_early(self, attempt: Attempt, cutoff: float) -> bool:
        """Return whether an attempt may end before the exit report: the caller has left, and no retry follows."""
        is_late = attempt.run.ending is not None or cutoff >= attempt.run.must_end_at
        return attempt.is_cancelled or (is_late and self._spec.retries is None)

    def _end(self, worker: WorkerView, attempts: Iterable[Attempt], exit_: Exit | None) -> None:
        error = worker_exit_error(worker.id, exit_).info()
        for attempt in attempts:
            self._ends.end_without_result(attempt, error)
