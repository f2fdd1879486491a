from __future__ import annotations

from gpufn_gateway.heard import Heard
from tests.gateway.conftest import ManualClock


def test_a_node_that_says_nothing_is_not_there_and_is_forgotten_when_another_comes() -> None:
    clock = ManualClock()
    heard = Heard[str](clock, fresh_s=10.0)
    heard.take("b", "of b")
    heard.take("a", "of a")
    clock.now += 10
    heard.take("a", "of a again")
    assert (heard.all(), heard.of("b")) == (["of a again", "of b"], "of b")
    clock.now += 1
    assert (heard.all(), heard.of("b"), heard.of("c")) == (["of a again"], None, None)
    heard.take("c", "of c")
    assert (heard.all(), len(heard)) == (["of a again", "of c"], 2)
