"""The states of an attempt and their transitions."""

from __future__ import annotations

import itertools

import pytest

from gpufn_core.protocol.streams.stream_window import STREAM_WINDOW
from gpufn_runtime.runner.core.attempt import TRANSITIONS, Attempt, AttemptState, Execution, may_run_s
from tests.runtime.runner.core.bench import NOW, FakeDelivery, FakeWorker, message_of, revision_of

PAIRS = list(itertools.product(AttemptState, AttemptState))
ALLOWED = [(old, new) for old, new in PAIRS if new in TRANSITIONS[old]]
MISSING = [(old, new) for old, new in PAIRS if new not in TRANSITIONS[old]]


def attempt_in(state: AttemptState) -> Attempt:
    revision = revision_of()
    worker = FakeWorker("w-1", revision)
    return Attempt(1, FakeDelivery(), message_of(), revision.spec.methods[0], worker, touched_at=0.0, state=state)


@pytest.mark.parametrize(("old", "new"), ALLOWED)
def test_a_transition_of_the_table_changes_the_state(old: AttemptState, new: AttemptState) -> None:
    attempt = attempt_in(old)
    attempt.move(new)
    assert attempt.state is new


@pytest.mark.parametrize(("old", "new"), MISSING)
def test_any_other_transition_raises(old: AttemptState, new: AttemptState) -> None:
    attempt = attempt_in(old)
    with pytest.raises(AssertionError, match=f"{old.name} to {new.name}"):
        attempt.move(new)
    assert attempt.state is old


def test_the_table_has_a_row_for_each_state() -> None:
    assert set(TRANSITIONS) == set(AttemptState)


def test_an_ended_attempt_never_changes() -> None:
    assert not TRANSITIONS[AttemptState.ENDED]


def test_every_state_is_reachable_and_leads_to_the_end() -> None:
    reachable = {AttemptState.PREPARING}
    while more := {new for old in reachable for new in TRANSITIONS[old]} - reachable:
        reachable |= more
    assert reachable == set(AttemptState)
    assert all(AttemptState.ENDED in TRANSITIONS[state] for state in AttemptState if state is not AttemptState.ENDED)


def test_an_attempt_is_preparing_first_and_has_no_run() -> None:
    revision = revision_of()
    attempt = Attempt(
        1, FakeDelivery(), message_of(), revision.spec.methods[0], FakeWorker("w", revision), touched_at=0
    )
    assert attempt.state is AttemptState.PREPARING
    with pytest.raises(AssertionError, match="has not begun"):
        _ = attempt.run


def test_a_stream_may_send_one_window_more_than_its_reader_has_taken() -> None:
    run = Execution(
        started_at=0, began=0, must_end_at=1, is_cold=False, busy_from=None, items=70, granted=STREAM_WINDOW
    )
    assert run.grant(10) == 10
    assert run.grant(10) == 0, "a repeated credit grants nothing"
    assert run.grant(1000) == 60, "a reader cannot have taken items that were not sent"
    assert run.granted == STREAM_WINDOW + 70


def test_a_run_that_does_not_stream_is_granted_no_items() -> None:
    run = Execution(started_at=0, began=0, must_end_at=1, is_cold=False, busy_from=None)
    assert run.grant(10) == 0


@pytest.mark.parametrize(("deadline", "seconds"), [(0.0, 30.0), (NOW + 10, 10.0), (NOW + 60, 30.0)])
def test_an_attempt_may_run_until_its_timeout_or_deadline(deadline: float, seconds: float) -> None:
    assert may_run_s(message_of(deadline=deadline), 30.0, NOW) == seconds
