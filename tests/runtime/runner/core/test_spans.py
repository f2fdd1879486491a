"""Spans of attempts, from the facts of their end."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpufn_core.domain import trace_context
from gpufn_core.domain.invocation import Outcome, OutcomeKind, StartReason
from gpufn_core.domain.retry_policy import Settlement
from gpufn_core.domain.trace_context import span_id
from gpufn_core.domain.worker import ColdStart
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.records import AttemptRecord
from gpufn_core.protocol.spans import Span, SpanError, SpanKind
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_runtime.runner.core import spans
from gpufn_runtime.runner.core.actions import Settle
from gpufn_runtime.runner.core.attempt import Attempt, Execution
from tests.runtime.runner.core.bench import FakeDelivery, FakeWorker, message_of, revision_of

AT = 1000.0
CALL = "01k9xq3zr7c8m2v5t000000011"
SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0{}"
SUCCEEDED = Outcome(OutcomeKind.SUCCEEDED)
RAISED = Outcome(OutcomeKind.RAISED, ErrorInfo("function_raised", "no", error_type="ValueError"))


def ended(
    outcome: Outcome = SUCCEEDED,
    settlement: Settlement = Settlement.ACK,
    *,
    sampled: bool = True,
    reason: StartReason = StartReason.FIRST,
    worker: FakeWorker | None = None,
    slow_s: float = math.inf,
    gather_s: float = 0.0,
    **fields: Any,
) -> Settle:
    """An attempt that began two seconds after its submission and took half a second."""
    values: dict[str, Any] = {"reply": "", "attempt": 1} | fields
    trace = trace_context.traced(SENT.format(int(sampled)), slow_s)
    message = message_of(CALL, submitted_at=AT, trace=trace, **values)
    worker = worker or FakeWorker("w-1", revision_of())
    begun = Execution(
        started_at=AT + 2, began=0.0, must_end_at=9.0, is_cold=worker.cold_start is not None, busy_from=None,
        elapsed_s=0.5, run_s=0.5 - gather_s,
    )  # fmt: skip
    attempt = Attempt(1, FakeDelivery(), message, MethodSpec(), worker, 0.0, reason=reason, begun=begun)
    return Settle(attempt, outcome, settlement, 0.5, 0.0, run_s=0.5 - gather_s, gather_s=gather_s)


def times(made: list[Span]) -> dict[str, tuple[float, float]]:
    return {span.name: (round(span.start - AT, 3), round(span.end - AT, 3)) for span in made}


def test_a_submitted_call_has_a_span_with_its_queue_and_its_run_below() -> None:
    made = spans.of_end(ended(), "node")
    assert times(made) == {"queue": (0, 2), "run": (2, 2.5), "f": (0, 2.5)}
    queue, run, call = made
    assert (call.kind, call.id, call.parent) == (SpanKind.CONSUMER, span_id(CALL), "b7ad6b7169203331")
    assert {queue.parent, run.parent} == {call.id}
    assert run.id == span_id(CALL, 1)
    assert (run.attributes["gpufn.node"], run.attributes["gpufn.worker"]) == ("node", "w-1")
    assert (run.attributes["faas.name"], run.attributes["faas.version"]) == ("f", "1")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"reply": "to a gateway"}, {"queue", "run"}),  # which records the call
        ({"reply": "to a runner", "parent": "another call"}, {"queue", "run", "f"}),
        ({"settlement": Settlement.RETRY, "outcome": RAISED}, {"queue", "run"}),
        ({"gather_s": 0.2}, {"queue", "gather", "run", "f"}),
        ({"sampled": False}, set()),
        ({"sampled": False, "outcome": Outcome(OutcomeKind.CANCELLED)}, set()),
        ({"sampled": False, "outcome": RAISED}, {"queue", "run", "f"}),
        ({"sampled": False, "slow_s": 2.5}, {"queue", "run", "f"}),
        ({"sampled": False, "slow_s": 2.6}, set()),
    ],
)
def test_which_spans_are_recorded(fields: dict[str, Any], names: set[str]) -> None:
    assert set(times(spans.of_end(ended(**fields), "node"))) == names


def test_a_nested_call_that_a_function_waits_for_is_of_kind_server() -> None:
    assert spans.of_end(ended(reply="to a runner", parent="another"), "node")[-1].kind is SpanKind.SERVER


def test_the_phases_of_a_cold_start_are_in_the_queue_and_not_before_it() -> None:
    cold = ColdStart(place_s=0.5, fetch_s=1.0, launch_s=0.25, load_s=0.5, warm_s=0.0)
    worker = FakeWorker("w-1", revision_of(), cold_start=cold, ready_at=AT + 1.5)
    made = spans.of_end(ended(worker=worker), "node")
    # It was placed before the call came; it began to fetch 0.25 s before.
    assert times(made) | {"fetch": (0, 0.75), "launch": (0.75, 1.0), "load": (1.0, 1.5)} == times(made)
    assert "place" not in times(made)
    assert "warm" not in times(made)
    assert {span.parent for span in made if span.name in cold.phases} == {span_id(CALL, 1, "queue")}


def test_a_failure_is_an_error_of_the_run_and_of_the_call() -> None:
    _, run, call = spans.of_end(ended(RAISED), "node")
    assert run.error == call.error == SpanError("function_raised", "ValueError: no")


def test_a_retry_waits_from_the_time_when_it_is_due() -> None:
    first = AttemptRecord(number=1, outcome=OutcomeKind.RAISED, ended_at=AT + 0.5)
    retried = ended(attempt=2, attempts=(first,), not_before=AT + 1.5, reason=StartReason.RAISED)
    assert times(spans.of_end(retried, "node"))["queue"] == (1.5, 2)


def test_an_attempt_whose_runner_died_is_recorded_with_the_next_one() -> None:
    lost = AttemptRecord(
        number=1, outcome=OutcomeKind.LOST, started_at=AT + 0.5, ended_at=AT + 1, code="worker_lost", node="other"
    )
    made = spans.of_end(ended(attempt=2, attempts=(lost,), reason=StartReason.RUNNER_LOST), "node")
    assert [(span.id, span.attributes["gpufn.node"]) for span in made if span.name == "run"] == [
        (span_id(CALL, 1), "other"),
        (span_id(CALL, 2), "node"),
    ]


@pytest.mark.parametrize("known", [(), (AttemptRecord(number=1, outcome=OutcomeKind.RAISED, ended_at=AT + 0.5),)])
def test_a_lost_attempt_without_a_note_has_a_span_with_the_error(known: tuple[AttemptRecord, ...]) -> None:
    """The start of a call with a waiting caller is not noted."""
    number = 2 + len(known)
    again = ended(attempt=number, attempts=known, reason=StartReason.RUNNER_LOST, reply="to a gateway")
    lost, _, run = spans.of_end(again, "node")
    assert (lost.name, lost.id, lost.parent) == ("run", span_id(CALL, number - 1), run.parent)
    assert (lost.attributes["gpufn.attempt"], lost.attributes["gpufn.outcome"]) == (number - 1, "lost")
    assert lost.error is not None
    assert lost.error.code == "worker_lost"
    assert lost.end <= run.start


def test_an_attempt_that_is_handed_back_is_recorded_without_its_call() -> None:
    made = spans.of_interrupted(ended(sampled=False).attempt, SpanError("stopped", "the node stops"), AT + 3, "node")
    assert times(made) == {"queue": (0, 2), "run": (2, 3)}
    assert made[-1].error == SpanError("stopped", "the node stops")


def test_a_call_that_ends_before_it_starts_has_a_span() -> None:
    message = ended(sampled=False).attempt.message
    (call,) = spans.of_refusal(message, Outcome(OutcomeKind.EXPIRED), AT + 1)
    assert (call.id, call.error) == (span_id(CALL), SpanError("expired", "expired"))
    assert not spans.of_refusal(message, Outcome(OutcomeKind.CANCELLED), AT + 1)
