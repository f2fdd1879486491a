from __future__ import annotations

import pytest

from gpufn_core.domain.traffic import Split, parse_return_rules
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import CallCounts, RevisionStatus, WorkerCounts
from gpufn_gateway.functions.return_rules import breach

GOOD = CallCounts(1000, 0, 0.1, 0.2)


def of(*rules: str) -> Split:
    return Split(weights={1: 90, 2: 10}, set_at=0.0, return_if=parse_return_rules(rules), min_calls=100)


def status(revision: int, recent: CallCounts, start_error: ErrorInfo | None = None) -> RevisionStatus:
    return RevisionStatus(revision=revision, workers=WorkerCounts(), recent=recent, start_error=start_error)


@pytest.mark.parametrize(
    ("rule", "canary", "is_broken"),
    [
        ("errors>2%", CallCounts(100, 2, 0.1, 0.2), False),
        ("errors>2%", CallCounts(100, 3, 0.1, 0.2), True),
        ("errors>2%", CallCounts(99, 99, 0.1, 0.2), False),  # too few calls
        ("p99>1.5x", CallCounts(100, 0, 0.1, 0.3), False),
        ("p99>1.5x", CallCounts(100, 0, 0.1, 0.31), True),
        ("p50>1.5x", CallCounts(100, 0, 0.16, 0.2), True),
        ("p50>1.5x", CallCounts(100, 0, 0.1, 9.0), False),
    ],
)
def test_a_revision_is_compared_with_the_rules_and_the_serving_one(
    rule: str, canary: CallCounts, is_broken: bool
) -> None:
    found = breach(of(rule), 1, [status(1, GOOD), status(2, canary)])
    assert (found is not None) is is_broken
    if found is not None:
        assert (found[0], found[1].startswith(rule)) == (2, True)


def test_a_duration_is_compared_only_with_enough_calls_of_the_serving_revision() -> None:
    slow = status(2, CallCounts(500, 0, 9.0, 9.0))
    assert breach(of("p99>1.5x"), 1, [status(1, CallCounts(99, 0, 0.1, 0.2)), slow]) is None
    assert breach(of("p99>1.5x"), 1, [slow]) is None


def test_the_serving_revision_breaks_no_rule() -> None:
    assert breach(of("errors>2%"), 1, [status(1, CallCounts(500, 500, 0.1, 0.2)), status(2, GOOD)]) is None


def test_a_revision_that_does_not_start_loses_its_calls_without_a_rule() -> None:
    error = ErrorInfo("function_start_failed", "no module torch\nTraceback ...")
    assert breach(of(), 1, [status(1, GOOD), status(2, CallCounts(), error)]) == (
        2,
        "its workers do not start: no module torch",
    )
    assert breach(of(), 1, [status(1, GOOD, error), status(2, GOOD)]) is None
