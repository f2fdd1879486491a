from __future__ import annotations

import weakref
from dataclasses import dataclass

from gpufn_gateway.nodes.latest_reports import LatestReports
from tests.gateway.conftest import ManualClock


@dataclass
class Report:
    """A report that can be weakly referenced, to test that it is freed."""

    node: str
    text: str = ""


def test_a_silent_node_is_absent() -> None:
    clock = ManualClock()
    latest = LatestReports[Report](clock, fresh_s=10.0)
    old, of_b, new, of_c = Report("a", "old"), Report("b"), Report("a", "new"), Report("c")
    latest.put(of_b)
    latest.put(old)
    clock.now += 10
    latest.put(new)
    assert (latest.all(), latest.get("b")) == ([new, of_b], of_b)
    clock.now += 1
    assert (latest.all(), latest.get("b"), latest.get("c")) == ([new], None, None)
    latest.put(of_c)
    assert latest.all() == [new, of_c]


def test_the_report_of_a_lost_node_is_kept_until_another_arrives_and_then_dropped() -> None:
    clock = ManualClock()
    latest = LatestReports[Report](clock, fresh_s=10.0)
    report = Report("b")
    reference = weakref.ref(report)
    latest.put(report)
    del report
    clock.now += 11
    latest.put(Report("a"))
    assert reference() is None
