from __future__ import annotations

import weakref

from gpufn_gateway.nodes.latest_reports import LatestReports
from tests.gateway.conftest import ManualClock


class Report:
    """A report that can be weakly referenced, to test that it is freed."""


def test_a_node_that_says_nothing_is_not_there() -> None:
    clock = ManualClock()
    heard = LatestReports[str](clock, fresh_s=10.0)
    heard.put("b", "of b")
    heard.put("a", "of a")
    clock.now += 10
    heard.put("a", "of a again")
    assert (heard.all(), heard.get("b")) == (["of a again", "of b"], "of b")
    clock.now += 1
    assert (heard.all(), heard.get("b"), heard.get("c")) == (["of a again"], None, None)
    heard.put("c", "of c")
    assert heard.all() == ["of a again", "of c"]


def test_what_a_node_said_that_has_gone_is_kept_until_another_comes_and_no_longer() -> None:
    clock = ManualClock()
    heard = LatestReports[Report](clock, fresh_s=10.0)
    said = Report()
    kept = weakref.ref(said)
    heard.put("b", said)
    del said
    clock.now += 11
    heard.put("a", Report())
    assert kept() is None
