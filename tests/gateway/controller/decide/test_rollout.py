from __future__ import annotations

import pytest

from gpufn_gateway.controller.decide.scaling.policy import Demand, Workers
from gpufn_gateway.controller.decide.scaling.rollout import (
    LINGER_S,
    RevisionHealth,
    may_move,
    workers_for_next,
    workers_for_retired,
)


@pytest.mark.parametrize(
    ("serving", "following", "moves"),
    [
        (RevisionHealth(ready=0), RevisionHealth(), False),
        (RevisionHealth(ready=0), RevisionHealth(ready=1), True),
        (RevisionHealth(ready=0, is_failing=True), RevisionHealth(), True),
        (RevisionHealth(ready=0), RevisionHealth(is_failing=True), False),
        (RevisionHealth(ready=1, want=1), RevisionHealth(ready=0), False),
        (RevisionHealth(ready=1, want=1), RevisionHealth(ready=1), True),
        (RevisionHealth(ready=4, want=3), RevisionHealth(ready=2), False),
        (RevisionHealth(ready=4, want=3), RevisionHealth(ready=3), True),
        (RevisionHealth(ready=4, want=None), RevisionHealth(ready=3), False),  # unknown: as many as are READY
        (RevisionHealth(ready=4, want=0), RevisionHealth(ready=1), True),
        (RevisionHealth(ready=4, want=1), RevisionHealth(ready=1, is_failing=True), False),
        (RevisionHealth(ready=4, want=4), RevisionHealth(ready=1, max_workers=2), False),
        (RevisionHealth(ready=4, want=4), RevisionHealth(ready=2, max_workers=2), True),  # it may not have more
        (RevisionHealth(ready=4, want=None), RevisionHealth(ready=2, max_workers=2), True),
        (
            RevisionHealth(ready=0, want=0),
            RevisionHealth(ready=0, max_workers=0),
            False,
        ),  # paused: it has not started
    ],
)
def test_when_calls_move(serving: RevisionHealth, following: RevisionHealth, moves: bool) -> None:
    assert may_move(serving, following)[0] is moves


def test_how_many_workers_the_next_and_a_retired_revision_have() -> None:
    standings = ((0, 0), (3, 5), (5, 3), (2, None))
    for most, numbers in ((None, [1, 3, 3, 2]), (9, [1, 3, 3, 2]), (2, [1, 2, 2, 2])):
        assert [workers_for_next(RevisionHealth(ready, want), most) for ready, want in standings] == numbers
    long_ago, just_now = LINGER_S, 0.0
    for since, wanted in ((long_ago, [2, 0, 1, 3]), (just_now, [2, 2, 1, 3])):
        pairs = ((None, 2), (0, 2), (1, 0), (1, 3))
        assert [
            workers_for_retired(None if queued is None else Demand(queued=queued, running=0), Workers(held), since)
            for queued, held in pairs
        ] == wanted
