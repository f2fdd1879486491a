"""How attempts of one Revision end: by their worker's Result, over time, cancelled, or with their worker.

What the runner has decided (a timeout, a cancel) holds, whatever the worker says afterwards. An attempt that a GPU's
failure ended is handed back, to run on another one.
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
from gpufn_runtime.runner.attempts.start_log import Starts
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.shared_bodies import NodeParcels
from gpufn_runtime.runner.workers.worker_link import WorkerLink

# How long a worker may take to say that it stopped. A sync function cannot be interrupted, so one that ran out of time
# is ended with its worker at once; a cancelled one may be about to end by itself, which keeps its worker warm.
_GRACE_S = {OutcomeKind.TIMED_OUT: STOPS_WITHIN_S, OutcomeKind.CANCELLED: 5.0}
_HANDED_BACK = {DeviceFailed.code: StartReason.DEVICE_FAILED, PlatformStopping.code: StartReason.STOPPED}


class Ends:
    """`ended`, `failed`, `run_seconds` and `gpu_seconds` count."""

    def __init__(
        self,
        *,
        clock: Clock,
        settler: Settler,
        starts: Starts,
        nested: NestedCalls,
        output: Output,
        parcels: NodeParcels,
        attempts: Attempts,
        meter: Meter,
    ) -> None:
        self._clock = clock
        self._settler = settler
        self._starts = starts
        self._nested = nested
        self._output = output
        self._parcels = parcels
        self._attempts = attempts
        self._meter = meter
        self.ended = self.failed = 0
        self.run_seconds = self.gpu_seconds = 0.0

    def free(self, attempt: Attempt) -> None:
        """Its slot can take another."""
        self._forget(attempt)
        attempt.link.slots.release()

    def by_result(self, attempt: Attempt, result: frames.Result, body: bytes) -> float:
        """Settle what its worker says, and free its slot; returns how long it ran."""
        run = attempt.run
        held_s = self._clock.monotonic() - run.began
        self.free(attempt)
        run_s = result.run_s if 0 <= result.run_s <= held_s else held_s
        charged_s = run_s if result.charged_s is None else result.charged_s
        charged_s = charged_s if 0 <= charged_s <= held_s else run_s
        gather_s = held_s - run_s if attempt.link.revision.spec.batch is not None else 0.0
        run.busy_s = min(run.busy_s, run_s)
        self.ended += 1
        self.run_seconds += run_s
        outcome = _as_decided(attempt, Outcome(result.kind, result.error))
        parcel = kept = ""
        if result.parcel:
            is_near = not attempt.is_submitted and self._parcels.reach(attempt.message)
            outcome, name = self._collect(attempt, outcome, result.parcel, is_near=is_near)
            parcel, kept = (name, "") if is_near else ("", name)
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
                kept=kept,
                run_s=run_s,
                gather_s=gather_s,
                now=self._clock.time(),
            )
        return run_s

    def begin(self, attempt: Attempt, kind: Decided, now: float) -> None:
        """Tell its worker to stop it, and wait for that a while. `now` is monotonic."""
        if attempt.run.ending is None:
            cannot_stop = attempt.method.kind is CallKind.SYNC and kind is OutcomeKind.TIMED_OUT
            attempt.run.ending = Ending(kind, now if cannot_stop else now + _GRACE_S[kind])
            attempt.link.send(frames.Cancel(attempt.number))
            self._nested.close_of(attempt)

    def give_up(self, attempt: Attempt) -> None:
        """It did not end in time: its slot is poisoned, and its worker goes when nothing else runs there."""
        del attempt.link.attempts[attempt.number]
        self._settle_lost(attempt, None)

    def take_all(self, link: WorkerLink) -> list[Attempt]:
        """What runs in a worker that is gone, to be ended by `with_worker` once it is known why. Until then they count
        as running, and whoever asks for them finds them."""
        attempts = list(link.attempts.values())
        link.attempts.clear()
        now = self._clock.monotonic()
        for attempt in attempts:
            attempt.run.lost_at = now
            self._stop_counting(attempt, now)
        return attempts

    def with_worker(self, link: WorkerLink, attempts: Iterable[Attempt], exit_: Exit | None) -> None:
        why = exit_.describe() if exit_ is not None else "closed its connection"
        tail = f"\n{exit_.tail}" if exit_ is not None and exit_.tail else ""
        what = f"worker {link.worker} {why} while it ran this call{tail}"
        error = _error_of(exit_)(what).info()
        for attempt in attempts:
            self._settle_lost(attempt, error)

    def log_failure(self, link: WorkerLink, error: ErrorInfo | None, invocation: str = "") -> None:
        """What the caller is told is kept in the function's log as well."""
        if error is not None:
            text = error.traceback or f"{error.code}: {error.message}"
            self._output.publish(link, invocation, "error", text.encode())

    def _settle_lost(self, attempt: Attempt, error: ErrorInfo | None) -> None:
        attempt.link.slots.poison()
        self._forget(attempt)
        self.ended += 1
        self.failed += 1
        outcome = _as_decided(attempt, Outcome(OutcomeKind.LOST, error))
        if not self._hands_back(attempt, outcome):
            self.log_failure(attempt.link, outcome.error, attempt.message.id)
            run_s = min(self._clock.monotonic(), attempt.run.lost_at) - attempt.run.began
            # Which calls ran together with it, only its worker knew.
            is_batched = attempt.link.revision.spec.batch is not None
            self._charge(attempt, outcome, min(run_s, attempt.run.busy_s) if is_batched else run_s)
            self._settler.settle(attempt, outcome, run_s=run_s, now=self._clock.time())

    def _hands_back(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Whether it runs again, though nobody has asked for a retry: its GPU failed, or its node stops."""
        error = outcome.error
        why = _HANDED_BACK.get(error.code) if error is not None else None
        if error is None or why is None or attempt.run.items:
            return False
        if why is StartReason.DEVICE_FAILED and attempt.delivery.delivered >= DELIVERIES_ON_FAILED_GPUS:
            return False
        self._starts.hand_back(attempt, why, error.summary)
        return True

    def _charge(self, attempt: Attempt, outcome: Outcome, run_s: float) -> None:
        is_failed, gpu_s = outcome.kind is not OutcomeKind.SUCCEEDED, attempt.gpu_s
        self.gpu_seconds += gpu_s
        self._meter.count(attempt.message, is_failed=is_failed, run_s=run_s, gpu_s=gpu_s)

    def _collect(self, attempt: Attempt, outcome: Outcome, parcel: str, *, is_near: bool) -> tuple[Outcome, str]:
        """A large result: its name in the folder of a caller who `is_near`, or in our own; or why it cannot be sent."""
        worker = attempt.link.worker
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            self._parcels.drop(worker, parcel)
            return outcome, ""
        try:
            if is_near:
                return outcome, self._parcels.collect(attempt.message, worker, parcel)
            return outcome, self._parcels.keep(worker, parcel)
        except ResultNotEncodable as error:
            return Outcome(OutcomeKind.RAISED, error.info()), ""

    def _forget(self, attempt: Attempt) -> None:
        self._stop_counting(attempt, self._clock.monotonic())
        self._attempts.discard(attempt)

    def _stop_counting(self, attempt: Attempt, now: float) -> None:
        """It takes no more of its worker's time, and none of its GPU's."""
        if isinstance(run := attempt.phase, Run) and run.busy_from is not None:
            run.busy_s = attempt.link.busy.end(run.busy_from, now)
            run.busy_from = None
        if attempt.link.seat is not None:
            attempt.link.seat.done(attempt)


def _error_of(exit_: Exit | None) -> type[GpufnError]:
    if exit_ is not None and exit_.stopping:
        return PlatformStopping
    return DeviceFailed if exit_ is not None and exit_.device_fault else WorkerLost


def _as_decided(attempt: Attempt, outcome: Outcome) -> Outcome:
    match attempt.run.ending:
        case None:
            return outcome
        case Ending(OutcomeKind.TIMED_OUT):
            return Outcome(OutcomeKind.TIMED_OUT, InvocationTimedOut(_why_timed_out(attempt)).info())
        case _:
            return Outcome(OutcomeKind.CANCELLED, InvocationCancelled().info())


def _why_timed_out(attempt: Attempt) -> str:
    limit_s = attempt.link.revision.spec.timeout_s
    if attempt.run.must_end_at >= attempt.run.began + limit_s:
        return f"it ran for longer than its timeout of {limit_s:g} s"
    return "it ran when its caller's deadline came"
