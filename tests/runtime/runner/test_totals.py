"""Totals of a runner: they never decrease, and each start counts once."""

from __future__ import annotations

import pytest

from gpufn_core.domain.worker import ColdStart
from gpufn_core.protocol.reports import FunctionTotals, RevisionTraffic
from gpufn_runtime.runner.totals import MAX_FUNCTIONS, Totals

# The counters of each revision of "f": revision number, ended, failed.
Counted = list[tuple[int, int, int]]


@pytest.mark.parametrize(
    ("reports", "ended", "failed"),
    [
        ([[(1, 2, 1)]], 2, 1),
        ([[(1, 2, 1)], [(1, 2, 1)]], 2, 1),
        ([[(1, 2, 1)], [(1, 5, 1)]], 5, 1),
        ([[(1, 2, 1), (2, 3, 0)]], 5, 1),
        ([[(1, 2, 1)], [], [(1, 1, 0)]], 3, 1),  # its workers stopped and were started again
        ([[(1, 2, 1)], [(1, 1, 0)]], 3, 1),  # the report in between was lost
    ],
)
def test_totals_continue_when_a_queue_resets_its_counts(reports: list[Counted], ended: int, failed: int) -> None:
    totals = Totals()
    for counted in reports:
        totals.add_traffic(RevisionTraffic("f", number, each, each, bad, 2.0 * each) for number, each, bad in counted)
    assert totals.report() == (FunctionTotals("f", ended, failed, run_seconds=2.0 * ended),)


def test_a_start_that_runner_and_agent_report_as_failed_counts_once() -> None:
    totals = Totals()
    totals.add_start("w-1", "f", ColdStart(launch_s=0.5, load_s=1.0))
    totals.add_failed_start("w-1", "f")  # it was ready, and crashed later
    totals.add_failed_start("w-2", "f")
    totals.add_failed_start("w-2", "f")
    totals.add_start("w-1", "f", ColdStart(resume_s=0.25))
    totals.add_retry("f")
    (report,) = totals.report()
    assert (report.starts, report.resumes, report.failed_starts, report.retries) == (1, 1, 1, 1)
    assert report.phase_seconds == {"launch": 0.5, "load": 1.0, "resume": 0.25}


def test_the_function_that_changed_least_recently_makes_room() -> None:
    totals = Totals()
    for number in range(MAX_FUNCTIONS):
        totals.add_retry(f"f{number}")
    totals.add_retry("f0")
    totals.add_retry("new")
    names = [each.function for each in totals.report()]
    assert (len(names), names[0], names[-2:]) == (MAX_FUNCTIONS, "f2", ["f0", "new"])
