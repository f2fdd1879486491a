from __future__ import annotations

import pytest

from gpufn_core.protocol.reports import RevisionTraffic, RunnerReport
from gpufn_gateway.calls.attempt_counts import AttemptCounts, AttemptTotals

# A runner's name, and its counters for each revision of "f": revision number, ended, failed.
Report = tuple[str, list[tuple[int, int, int]]]


@pytest.mark.parametrize(
    ("reports", "ended", "failed"),
    [
        ([("r", [(1, 2, 1)])], 2, 1),
        ([("r", [(1, 2, 1)]), ("r", [(1, 2, 1)])], 2, 1),
        ([("r", [(1, 2, 1)]), ("r", [(1, 5, 1)])], 5, 1),
        ([("r", [(1, 2, 1), (2, 3, 0)])], 5, 1),
        ([("r", [(1, 2, 1)]), ("r", []), ("r", [(1, 1, 0)])], 3, 1),  # its workers stopped and were started again
        ([("r", [(1, 2, 1)]), ("r", [(1, 1, 0)])], 3, 1),  # the report in between was lost
        ([("r", [(1, 2, 1)]), ("later", [(1, 3, 0)])], 5, 1),
        ([("r", [(1, 2, 1)]), ("later", [(1, 1, 0)]), ("r", [(1, 3, 1)]), ("later", [(1, 1, 0)])], 4, 1),
    ],
)
def test_counts_go_on_where_a_runner_counts_anew(reports: list[Report], ended: int, failed: int) -> None:
    attempts = AttemptTotals()
    for runner, counted in reports:
        traffic = tuple(RevisionTraffic("f", number, each, each, bad, 2.0 * each) for number, each, bad in counted)
        attempts.add_report(RunnerReport("n", runner, 0.0, traffic=traffic))
    assert list(attempts) == [("n", "f", AttemptCounts(ended, failed, 2.0 * ended))]


def test_nodes_and_functions_are_told_apart_and_those_without_calls_are_none() -> None:
    attempts = AttemptTotals()
    for node, function, ended in (("a", "f", 1), ("b", "f", 2), ("b", "g", 3), ("b", "idle", 0)):
        attempts.add_report(RunnerReport(node, "r", 0.0, traffic=(RevisionTraffic(function, 1, ended, ended),)))
    assert {(node, function): counts.ended for node, function, counts in attempts} == {
        ("a", "f"): 1, ("b", "f"): 2, ("b", "g"): 3,
    }  # fmt: skip
    attempts.forget("f")
    assert [(node, function) for node, function, _ in attempts] == [("b", "g")]
