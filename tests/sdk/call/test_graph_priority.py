"""The order of a graph's steps: tables, and simulations with few slots."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import pytest

from gpufn.call.graph_priority import Order, ranks


@pytest.mark.parametrize(
    ("needs", "costs", "expected"),
    [
        ([], [], []),
        ([[]], [3.0], [3.0]),
        ([[], [0], [1]], [1.0, 2.0, 3.0], [6.0, 5.0, 3.0]),
        ([[], [], [0, 1]], [5.0, 1.0, 2.0], [7.0, 3.0, 2.0]),
        ([[], [0], [0], [1, 2]], [1.0, 10.0, 1.0, 1.0], [12.0, 11.0, 2.0, 1.0]),
        ([[], [], []], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    ],
)
def test_a_rank_is_the_cost_of_the_longest_chain(
    needs: list[list[int]], costs: list[float], expected: list[float]
) -> None:
    assert ranks(needs, costs) == expected


@pytest.mark.parametrize("needs", [[[0]], [[1], []], [[], [2], [1]]])
def test_a_step_that_needs_itself_or_a_later_one_is_refused(needs: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"step \d needs step \d"):
        ranks(needs, [1.0] * len(needs))


def test_steps_start_after_their_dependencies_and_equal_steps_in_order() -> None:
    order = Order([[], [], [0, 1, 1], [2]], [1.0] * 4)
    assert [order.take(), order.take(), order.take()] == [0, 1, None]
    order.mark_ended(1)
    assert order.take() is None
    order.mark_ended(0)
    assert [order.take(), order.take()] == [2, None]
    order.mark_ended(2)
    assert order.take() == 3


def _play(order: Order, costs: Sequence[float], slots: int) -> float:
    """Return how long the graph takes with this number of slots."""
    now, running = 0.0, list[tuple[float, int]]()
    while True:
        while len(running) < slots and (step := order.take()) is not None:
            heapq.heappush(running, (now + costs[step], step))
        if not running:
            return now
        now, step = heapq.heappop(running)
        order.mark_ended(step)


def test_a_long_chain_starts_before_short_steps() -> None:
    """Two slots: six short steps and a chain of three long ones, written last."""
    needs: list[list[int]] = [[], [], [], [], [], [], [], [6], [7]]
    costs = [1.0] * 6 + [2.0] * 3
    assert Order(needs, costs).take() == 6
    assert _play(Order(needs, costs), costs, 2) == 6.0
    assert (
        _play(Order(needs, [0.0] * 9), costs, 2) == 9.0
    )  # without costs: in the order of definition, so the chain runs alone at the end
