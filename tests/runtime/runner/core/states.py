"""Attempts in each state of the state machine, and the records and notes of their calls."""

from __future__ import annotations

import math
from typing import Any

from gpufn_core.domain.invocation import InvocationState, StartReason
from gpufn_core.domain.worker import Exit
from gpufn_core.errors import WorkerLost
from gpufn_core.protocol.records import BodyReference, CallRecord, StartNote
from gpufn_runtime.runner.core import actions
from gpufn_runtime.runner.core.attempt import Attempt
from tests.runtime.runner.core.bench import NOW, Bench, message_of

KILLED = Exit(signal=9)
LATER = WorkerLost("not now").info()
NEVER = math.inf
REFERENCE = BodyReference("i-1", "digest", 1 << 20)


def shared_by_time(**options: Any) -> Bench:
    """A machine whose worker shares its GPU with workers of other functions."""
    bench = Bench(**options)
    bench.worker(gpu="GPU-1", must_take_turns=True, needs_turn=True)
    return bench


def waiting(bench: Bench, **delivery: Any) -> Attempt:
    """An attempt that waits for a turn on the GPU."""
    bench.arrive(**delivery)
    return bench.one(actions.RequestTurn).attempt


def preparing(bench: Bench, **delivery: Any) -> Attempt:
    bench.arrive(message_of(reference=REFERENCE), **delivery)
    return bench.one(actions.GetArguments).attempt


def checking_record(bench: Bench, delivered: int = 2, **message: Any) -> Attempt:
    bench.arrive_submitted(delivered=delivered, **message)
    return bench.one(actions.CheckRecord).attempt


def checking_caller(bench: Bench) -> Attempt:
    bench.arrive(delivered=2)
    return bench.one(actions.CheckCaller).attempt


def running(bench: Bench) -> Attempt:
    return bench.start()


def stopping(bench: Bench) -> Attempt:
    attempt = bench.start()
    bench.cancel(attempt)
    return attempt


def lost(bench: Bench) -> Attempt:
    attempt = bench.start()
    bench.lose(attempt.worker)  # type: ignore[arg-type]
    return attempt


def record_of(state: InvocationState, attempt: int = 1) -> CallRecord:
    return CallRecord(id="i-1", function="f", revision=1, state=state, submitted_at=NOW - 1, attempt=attempt)


def note_of(attempt: int = 1, delivered: int = 1, **fields: Any) -> StartNote:
    return StartNote(
        seq=1, delivered=delivered, attempt=attempt, reason=StartReason.FIRST, node="n", worker="w-0",
        started_at=NOW - 5, **fields,
    )  # fmt: skip
