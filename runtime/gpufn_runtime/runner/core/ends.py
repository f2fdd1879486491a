"""The end of an Attempt: its outcome, whether its call runs again, what it is charged, and the counters. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from gpufn_core.domain.durations import bucket_of
from gpufn_core.domain.invocation import Outcome, OutcomeKind
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import frames
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_runtime.runner.core import actions
from gpufn_runtime.runner.core.attempt import Attempt, AttemptState
from gpufn_runtime.runner.core.end_rules import SETTLEMENTS, Ending, ending_of, hand_back_reason, outcome_of_stop
from gpufn_runtime.runner.core.step import Step

# Each call needs these, and Python looks up a member of an enum slowly.
_SUCCEEDED, _CANCELLED, _HAND_BACK = OutcomeKind.SUCCEEDED, OutcomeKind.CANCELLED, Ending.HAND_BACK
_ENDED = AttemptState.ENDED


@dataclass(slots=True, eq=False)
class CallTotals:
    """Counters of one Revision's attempts here, for reports."""

    started: int = 0
    ended: int = 0
    failed: int = 0
    errors: int = 0  # failed attempts, without cancelled or handed-back ones
    run_seconds: float = 0.0
    gpu_seconds: float = 0.0
    counts_durations: bool = False  # set for a split function
    durations: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # by `bucket_of`
    batches: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # calls by size of batch


class Ends:
    """Ends attempts: frees what they hold, counts them, and emits how their calls go on."""

    def __init__(self, spec: FunctionSpec, step: Step) -> None:
        self.totals = CallTotals()
        self._spec = spec
        self._step = step
        self._gathers = spec.largest_batch is not None

    def end_with_result(
        self,
        attempt: Attempt,
        result: frames.Result,
        outcome: Outcome,
        *,
        body: bytes = b"",
        shared_body: str = "",
        runner_file: str = "",
    ) -> None:
        run, totals = attempt.run, self.totals
        totals.ended += 1
        totals.run_seconds += run.run_s
        if outcome.kind is not _SUCCEEDED:
            totals.failed += 1
            body = b""
            self._step.emit(actions.LogFailure(attempt.worker, outcome.error, attempt.message))
        ending = ending_of(attempt, outcome, self._step.now.unix)
        if ending is _HAND_BACK:
            self._hand_back(attempt, outcome)
            return
        totals.errors += outcome.kind is not _SUCCEEDED and outcome.kind is not _CANCELLED
        if totals.counts_durations:
            totals.durations[bucket_of(run.run_s)] += 1
        charged_s = run.run_s if result.charged_s is None else within(result.charged_s, run.elapsed_s, run.run_s)
        if result.charged_s is not None and (batch := self._spec.largest_batch) is not None:
            totals.batches[_batch_size(run.run_s, charged_s, batch.max_size)] += 1
        gpu_s = attempt.gpu_s
        totals.gpu_seconds += gpu_s
        self._step.emit(
            actions.Settle(
                attempt,
                outcome,
                SETTLEMENTS[ending],
                charged_s,
                gpu_s,
                content_type=result.content_type,
                body=body,
                shared_body=shared_body,
                runner_file=runner_file,
                run_s=run.run_s,
                gather_s=run.elapsed_s - run.run_s if self._gathers else 0.0,
            )
        )

    def end_without_result(self, attempt: Attempt, error: ErrorInfo | None) -> None:
        """End an attempt that cannot be proven to have stopped: its slot is poisoned."""
        attempt.worker.slots.poison()
        self.leave_worker(attempt)
        run, totals = attempt.run, self.totals
        totals.ended += 1
        totals.failed += 1
        outcome = Outcome(OutcomeKind.LOST, error)
        if run.ending is not None:
            outcome = outcome_of_stop(run, run.ending, self._spec.timeout_s)
        ending = ending_of(attempt, outcome, self._step.now.unix)
        if ending is _HAND_BACK:
            self._hand_back(attempt, outcome)
            return
        totals.errors += outcome.kind is not _CANCELLED
        self._step.emit(actions.LogFailure(attempt.worker, outcome.error, attempt.message))
        run_s = min(self._step.now.monotonic, run.lost_at) - run.began
        if totals.counts_durations:
            totals.durations[bucket_of(run_s)] += 1
        # For a batch, only the worker knew which calls ran together.
        charged_s = min(run_s, run.busy_s) if self._gathers else run_s
        gpu_s = attempt.gpu_s
        totals.gpu_seconds += gpu_s
        self._step.emit(actions.Settle(attempt, outcome, SETTLEMENTS[ending], charged_s, gpu_s, run_s=run_s))

    def _hand_back(self, attempt: Attempt, outcome: Outcome) -> None:
        reason = hand_back_reason(outcome)
        assert reason is not None
        assert outcome.error is not None
        self._step.emit(actions.HandBack(attempt, reason, outcome.error.summary))

    def leave_worker(self, attempt: Attempt) -> None:
        attempt.move(_ENDED)
        attempt.worker.attempts.pop(attempt.number, None)
        self.stop_counting(attempt)
        self._step.emit(actions.Release(attempt))

    def stop_counting(self, attempt: Attempt) -> None:
        """Stop counting the worker's time for this attempt."""
        run = attempt.run
        if run.busy_from is not None:
            run.busy_s = attempt.worker.busy.end(run.busy_from, self._step.now.monotonic)
            run.busy_from = None


def within(value: float, limit: float, default: float) -> float:
    """Return a duration that a worker reported, or `default` if it is not in 0..limit."""
    return value if 0 <= value <= limit else default


def _batch_size(run_s: float, charged_s: float, largest: int) -> int:
    """Return the number of calls of a batch, from one call's part of its run, rounded up to a power of two.

    >>> [_batch_size(3.0, charged_s, 32) for charged_s in (3.0, 1.0, 0.0, 9.0)]
    [1, 4, 32, 1]
    """
    size = min(round(run_s / charged_s), largest) if charged_s > run_s / largest else largest
    return 1 << (max(size, 1) - 1).bit_length()
