from __future__ import annotations

import pytest

from gpufn_gateway.controller.decide.policy import Demand, Workers
from gpufn_gateway.controller.decide.rollout import LINGER_S, Standing, may_move, workers_for_next, workers_for_retired


@pytest.mark.parametrize(
    ("serving", "following", "moves"),
    [
        (Standing(ready=0), Standing(), False),
        (Standing(ready=0), Standing(ready=1), True),
        (Standing(ready=0, is_failing=True), Standing(), True),
        (Standing(ready=0), Standing(is_failing=True), False),
        (Standing(ready=1, want=1), Standing(ready=0), False),
        (Standing(ready=1, want=1), Standing(ready=1), True),
        (Standing(ready=4, want=3), Standing(ready=2), False),
        (Standing(ready=4, want=3), Standing(ready=3), True),
        (Standing(ready=4, want=None), Standing(ready=3), False),  # unknown: as many as there are
        (Standing(ready=4, want=0), Standing(ready=1), True),
        (Standing(ready=4, want=1), Standing(ready=1, is_failing=True), False),
        (Standing(ready=4, want=4), Standing(ready=1, most=2), False),
        (Standing(ready=4, want=4), Standing(ready=2, most=2), True),  # more it may not have
        (Standing(ready=4, want=None), Standing(ready=2, most=2), True),
        (Standing(ready=0, want=0), Standing(ready=0, most=0), False),  # paused: it has not shown that it starts
    ],
)
def test_when_calls_move(serving: Standing, following: Standing, moves: bool) -> None:
    assert may_move(serving, following)[0] is moves


def test_how_many_workers_the_next_and_a_retired_revision_have() -> None:
    standings = ((0, 0), (3, 5), (5, 3), (2, None))
    for most, numbers in ((None, [1, 3, 3, 2]), (9, [1, 3, 3, 2]), (2, [1, 2, 2, 2])):
        assert [workers_for_next(Standing(ready, want), most) for ready, want in standings] == numbers
    long_ago, just_now = LINGER_S, 0.0
    for since, wanted in ((long_ago, [2, 0, 1, 3]), (just_now, [2, 2, 1, 3])):
        pairs = ((None, 2), (0, 2), (1, 0), (1, 3))
        assert [
            workers_for_retired(None if queued is None else Demand(queued=queued, running=0), Workers(held), since)
            for queued, held in pairs
        ] == wanted
