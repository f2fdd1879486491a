"""The ends of a Revision's attempts: result, timeout, cancellation, or loss of the worker.

The runner's decision (a timeout or a cancel) overrides a later result. An attempt that ended because its GPU failed is
handed back, to run on another GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpufn_core.domain.invocation import DELIVERIES_ON_FAILED_GPUS, STOPS_WITHIN_S, Outcome, OutcomeKind, StartReason
from gpufn_core.domain.worker import Exit
from gpufn_core.errors import (
    DeviceFailed,
    ErrorInfo,
    GpufnError,
    InvocationCancelled,
    InvocationTimedOut,
    PlatformStopping,
    ResultNotEncodable,
    WorkerLost,
)
from gpufn_core.protocol import frames
from gpufn_core.spec.function_spec import CallKind
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.attempts.attempt import Attempt, Decided, Ending, Run
from gpufn_runtime.runner.attempts.attempt_index import Attempts
from gpufn_runtime.runner.attempts.metering import Meter
from gpufn_runtime.runner.attempts.settle import Settler
from gpufn_runtime.runner.attempts.start_log import StartLog
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies
from gpufn_runtime.runner.workers.worker_link import WorkerLink

# How long a worker may take to stop a call. A sync function cannot be interrupted, so its worker is killed at once
# after a timeout. A cancelled call may be about to end by itself, which would keep the worker warm.
_STOP_TIMEOUT_S = {OutcomeKind.TIMED_OUT: STOPS_WITHIN_S, OutcomeKind.CANCELLED: 5.0}
_HAND_BACK_REASONS = {DeviceFailed.code: StartReason.DEVICE_FAILED, PlatformStopping.code: StartReason.STOPPED}


class AttemptFinisher:
    """Ends attempts and settles them. `ended`, `failed`, `run_seconds` and `gpu_seconds` are counters."""

    def __init__(
        self,
        *,
        clock: Clock,
        settler: Settler,
        start_log: StartLog,
        nested: NestedCalls,
        output: Output,
        shared_bodies: NodeSharedBodies,
        attempts: Attempts,
        meter: Meter,
    ) -> None:
        self._clock = clock
        self._settler = settler
        self._start_log = start_log
        self._nested = nested
        self._output = output
        self._shared_bodies = shared_bodies
        self._attempts = attempts
        self._meter = meter
        self.ended = self.failed = 0
        self.run_seconds = self.gpu_seconds = 0.0

    def free(self, attempt: Attempt) -> None:
        """Free the attempt's slot."""
        self._forget(attempt)
        attempt.link.slots.release()

    def by_result(self, attempt: Attempt, result: frames.Result, body: bytes) -> float:
        """Settle a worker's result and free the slot. Returns the run time in seconds."""
        run = attempt.run
        elapsed_s = self._clock.monotonic() - run.began
        self.free(attempt)
        run_s = result.run_s if 0 <= result.run_s <= elapsed_s else elapsed_s
        charged_s = run_s if result.charged_s is None else result.charged_s
        charged_s = charged_s if 0 <= charged_s <= elapsed_s else run_s
        gather_s = elapsed_s - run_s if attempt.link.revision.spec.batch is not None else 0.0
        run.busy_s = min(run.busy_s, run_s)
        self.ended += 1
        self.run_seconds += run_s
        outcome = _apply_decision(attempt, Outcome(result.kind, result.error))
        parcel = runner_file = ""
        if result.parcel:
            is_local = not attempt.is_submitted and self._shared_bodies.reach(attempt.message)
            outcome, name = self._collect_result(attempt, outcome, result.parcel, is_local=is_local)
            parcel, runner_file = (name, "") if is_local else ("", name)
            body = b""
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            self.failed += 1
            body = b""
            self.log_failure(attempt.link, outcome.error, attempt.message.id)
        if not self._hands_back(attempt, outcome):
            self._charge(attempt, outcome, charged_s)
            self._settler.settle(
                attempt,
                outcome,
                result.content_type,
                body,
                parcel=parcel,
                runner_file=runner_file,
                run_s=run_s,
                gather_s=gather_s,
                now=self._clock.time(),
            )
        return run_s

    def begin(self, attempt: Attempt, kind: Decided, now: float) -> None:
        """Tell the worker to stop the attempt, with a deadline. `now` is monotonic."""
        if attempt.run.ending is None:
            is_uninterruptible = attempt.method.kind is CallKind.SYNC and kind is OutcomeKind.TIMED_OUT
            attempt.run.ending = Ending(kind, now if is_uninterruptible else now + _STOP_TIMEOUT_S[kind])
            attempt.link.send(frames.Cancel(attempt.number))
            self._nested.close_of(attempt)

    def abandon(self, attempt: Attempt) -> None:
        """Give up an attempt that did not stop in time: poison its slot. Its worker ends when nothing else runs
        there."""
        del attempt.link.attempts[attempt.number]
        self._settle_lost(attempt, None)

    def detach_all(self, link: WorkerLink) -> list[Attempt]:
        """Take the attempts of a worker that is gone. `with_worker` ends them once the reason is known. Until then they
        count as running and can be looked up."""
        attempts = list(link.attempts.values())
        link.attempts.clear()
        now = self._clock.monotonic()
        for attempt in attempts:
            attempt.run.lost_at = now
            self._stop_counting(attempt, now)
        return attempts

    def with_worker(self, link: WorkerLink, attempts: Iterable[Attempt], exit_: Exit | None) -> None:
        reason = exit_.describe() if exit_ is not None else "closed its connection"
        tail = f"\n{exit_.tail}" if exit_ is not None and exit_.tail else ""
        message = f"worker {link.worker} {reason} while it ran this call{tail}"
        error = _error_type(exit_)(message).info()
        for attempt in attempts:
            self._settle_lost(attempt, error)

    def log_failure(self, link: WorkerLink, error: ErrorInfo | None, invocation: str = "") -> None:
        """Write a failure to the function's log, as the caller receives it."""
        if error is not None:
            text = error.traceback or f"{error.code}: {error.message}"
            self._output.publish(link, invocation, "error", text.encode())

    def _settle_lost(self, attempt: Attempt, error: ErrorInfo | None) -> None:
        attempt.link.slots.poison()
        self._forget(attempt)
        self.ended += 1
        self.failed += 1
        outcome = _apply_decision(attempt, Outcome(OutcomeKind.LOST, error))
        if not self._hands_back(attempt, outcome):
            self.log_failure(attempt.link, outcome.error, attempt.message.id)
            run_s = min(self._clock.monotonic(), attempt.run.lost_at) - attempt.run.began
            # For a batch, only the worker knew which calls ran together.
            is_batched = attempt.link.revision.spec.batch is not None
            self._charge(attempt, outcome, min(run_s, attempt.run.busy_s) if is_batched else run_s)
            self._settler.settle(attempt, outcome, run_s=run_s, now=self._clock.time())

    def _hands_back(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Return whether the attempt runs again without a retry policy: its GPU failed, or its node stops."""
        error = outcome.error
        reason = _HAND_BACK_REASONS.get(error.code) if error is not None else None
        if error is None or reason is None or attempt.run.items:
            return False
        if reason is StartReason.DEVICE_FAILED and attempt.delivery.delivered >= DELIVERIES_ON_FAILED_GPUS:
            return False
        self._start_log.hand_back(attempt, reason, error.summary)
        return True

    def _charge(self, attempt: Attempt, outcome: Outcome, run_s: float) -> None:
        is_failed, gpu_s = outcome.kind is not OutcomeKind.SUCCEEDED, attempt.gpu_s
        self.gpu_seconds += gpu_s
        self._meter.count(attempt.message, is_failed=is_failed, run_s=run_s, gpu_s=gpu_s)

    def _collect_result(
        self, attempt: Attempt, outcome: Outcome, parcel: str, *, is_local: bool
    ) -> tuple[Outcome, str]:
        """Collect a large result. Returns its name, in a local caller's folder or the runner's, or the error
        outcome."""
        worker = attempt.link.worker
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            self._shared_bodies.drop(worker, parcel)
            return outcome, ""
        try:
            if is_local:
                return outcome, self._shared_bodies.collect(attempt.message, worker, parcel)
            return outcome, self._shared_bodies.keep(worker, parcel)
        except ResultNotEncodable as error:
            return Outcome(OutcomeKind.RAISED, error.info()), ""

    def _forget(self, attempt: Attempt) -> None:
        self._stop_counting(attempt, self._clock.monotonic())
        self._attempts.discard(attempt)

    def _stop_counting(self, attempt: Attempt, now: float) -> None:
        """Stop counting the worker's time and the GPU turn for this attempt."""
        if isinstance(run := attempt.phase, Run) and run.busy_from is not None:
            run.busy_s = attempt.link.busy.end(run.busy_from, now)
            run.busy_from = None
        if attempt.link.seat is not None:
            attempt.link.seat.done(attempt)


def _error_type(exit_: Exit | None) -> type[GpufnError]:
    if exit_ is not None and exit_.stopping:
        return PlatformStopping
    return DeviceFailed if exit_ is not None and exit_.device_fault else WorkerLost


def _apply_decision(attempt: Attempt, outcome: Outcome) -> Outcome:
    match attempt.run.ending:
        case None:
            return outcome
        case Ending(OutcomeKind.TIMED_OUT):
            return Outcome(OutcomeKind.TIMED_OUT, InvocationTimedOut(_timeout_message(attempt)).info())
        case _:
            return Outcome(OutcomeKind.CANCELLED, InvocationCancelled().info())


def _timeout_message(attempt: Attempt) -> str:
    limit_s = attempt.link.revision.spec.timeout_s
    if attempt.run.must_end_at >= attempt.run.began + limit_s:
        return f"it ran for longer than its timeout of {limit_s:g} s"
    return "it was still running at its caller's deadline"
