"""The order of turns on a time-shared GPU: examples, and properties for any calls."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufn_core.domain.devices.gpu_fair_queue import Arrivals, FairQueueing, Order, ShortestFirst, Turn

# --- a simulated GPU --------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    flow: str
    at: float
    service_s: float


class Begun(NamedTuple):
    call: Call
    at: float


def play(calls: list[Call], order: Order[Call], at_once: int, check: Callable[[float, int, int], None]) -> list[Begun]:
    """`check(now, waiting, running)` is called whenever no further turn may start."""
    begun: list[Begun] = []
    numbers = itertools.count()
    events: list[tuple[float, int, Call | Turn[Call] | None]] = [(call.at, next(numbers), call) for call in calls]
    heapq.heapify(events)
    waiting = running = 0
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Call):
            order.wait(event.flow, event, now)
            waiting += 1
        elif event is not None:
            order.end(event, now)
            running -= 1
        while (turn := order.next(now)) is not None:
            begun.append(Begun(turn.what, now))
            heapq.heappush(events, (now + turn.what.service_s, next(numbers), turn))
            waiting -= 1
            running += 1
        assert running <= at_once
        check(now, waiting, running)
        if (again := order.next_check_at(now)) < math.inf:
            assert again > now
            heapq.heappush(events, (again, next(numbers), None))
    assert (waiting, running) == (0, 0)
    return begun


def anything(now: float, waiting: int, running: int) -> None:
    pass


CALLS = st.lists(
    st.builds(Call, st.sampled_from("abcd"), st.floats(0, 20), st.floats(0.01, 2)), min_size=1, max_size=120
)
AT_ONCE = st.integers(1, 3)
OVERRUN_S = st.sampled_from([0.0, 0.5, 3.0])
WARM = st.frozensets(st.sampled_from("abcd"))


def most_ahead_s(begun: list[Begun]) -> float:
    """The largest excess, in seconds of started service, of one flow over another that waited all the time."""
    waits: dict[str, list[tuple[float, float]]] = {}
    for call, at in sorted(begun, key=lambda each: each.call.at):
        periods = waits.setdefault(call.flow, [])
        if periods and call.at <= periods[-1][1]:
            periods[-1] = periods[-1][0], max(periods[-1][1], at)
        else:
            periods.append((call.at, at))
    most = 0.0
    for flow, other in itertools.permutations(waits, 2):
        for begin, end in waits[other]:
            ahead_s = 0.0  # of the largest span that ends here
            for call, at in begun:
                if begin <= at < end and call.flow in (flow, other):
                    ahead_s = max(0.0, ahead_s + (call.service_s if call.flow == flow else -call.service_s))
                    most = max(most, ahead_s)
    return most


# --- properties for any calls -----------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(CALLS, AT_ONCE, OVERRUN_S, WARM)
def test_no_flow_gets_far_ahead_of_one_that_waits(
    calls: list[Call], at_once: int, overrun_s: float, warm: frozenset[str]
) -> None:
    order = FairQueueing[Call](at_once, overrun_s=overrun_s, is_warm=warm.__contains__)
    begun = play(calls, order, at_once, anything)
    # Services are random, so the estimate of each running turn may be wrong by the longest service, in both directions.
    wrong_s = max(overrun_s / 10, *(call.service_s for call in calls))
    assert most_ahead_s(begun) <= 2 * overrun_s + (6 * at_once + 2) * wrong_s


def test_first_come_first_served_is_not_fair_in_this_sense() -> None:
    calls = [Call("a", 0.0, 1.0)] * 100 + [Call("b", 0.001, 1.0)] * 100
    assert most_ahead_s(play(calls, Arrivals[Call](), 1, anything)) == 99
    assert most_ahead_s(play(calls, FairQueueing[Call](overrun_s=2.0), 1, anything)) <= 2 * 2.0 + 2 * 1.0


@settings(max_examples=60)
@given(CALLS, AT_ONCE, OVERRUN_S, st.sampled_from([Arrivals, ShortestFirst, FairQueueing]))
def test_no_turn_is_free_while_anybody_waits(
    calls: list[Call], at_once: int, overrun_s: float, kind: Callable[[int], Order[Call]]
) -> None:
    order = FairQueueing[Call](at_once, overrun_s=overrun_s) if kind is FairQueueing else kind(at_once)

    def check(now: float, waiting: int, running: int) -> None:
        assert not waiting or running == at_once

    play(calls, order, at_once, check)


@settings(max_examples=60)
@given(CALLS, AT_ONCE, OVERRUN_S)
def test_a_turn_is_held_for_the_configured_time_and_no_longer(
    calls: list[Call], at_once: int, overrun_s: float
) -> None:
    order = FairQueueing[Call](at_once, overrun_s=overrun_s, hold_s=0.25)

    def check(now: float, waiting: int, running: int) -> None:
        if waiting and running < at_once:
            assert now < order.next_check_at(now) <= now + 0.25

    assert len(play(calls, order, at_once, check)) == len(calls)


@settings(max_examples=60)
@given(CALLS, AT_ONCE, st.sampled_from([Arrivals, ShortestFirst, FairQueueing]))
def test_calls_of_one_flow_keep_their_order(
    calls: list[Call], at_once: int, kind: Callable[[int], Order[Call]]
) -> None:
    begun = play(calls, kind(at_once), at_once, anything)
    for flow in "abcd":
        times = [call.at for call, _ in begun if call.flow == flow]
        assert times == sorted(times)


# --- examples ---------------------------------------------------------------------------------------------------------


def turns(order: Order[str], *, count: int, turn_s: dict[str, float], now: float = 0.0) -> str:
    """The flows of `count` consecutive turns; `what` is the name of the flow."""
    served = ""
    for _ in range(count):
        turn = order.next(now)
        assert turn is not None
        served += turn.flow
        now += turn_s[turn.flow]
        order.end(turn, now)
    return served


def backlog(order: Order[str], flows: str, each: int = 20, now: float = 0.0) -> None:
    for flow in flows:
        for _ in range(each):
            order.wait(flow, flow, now)


@pytest.mark.parametrize(
    ("overrun_s", "served"),
    [
        (0.0, "abaabaabaaba"),  # b's turns take twice as long, so it gets half as many
        (3.5, "aaaabbbbaaaa"),  # the current flow continues until it is 3.5 s ahead
        (100.0, "aaaaaaaaaaaa"),
    ],
)
def test_time_is_shared_alike_in_stretches_as_long_as_overrun(overrun_s: float, served: str) -> None:
    order = FairQueueing[str](overrun_s=overrun_s)
    backlog(order, "ab")
    assert turns(order, count=12, turn_s={"a": 1.0, "b": 2.0}) == served


def test_a_flow_that_returns_has_no_saved_service() -> None:
    order = FairQueueing[str](overrun_s=0.0)
    order.wait("b", "b", 0.0)
    turns(order, count=1, turn_s={"b": 1.0})
    backlog(order, "a", now=1.0)
    turns(order, count=10, turn_s={"a": 1.0}, now=1.0)
    backlog(order, "b", now=11.0)
    assert turns(order, count=6, turn_s={"a": 1.0, "b": 1.0}, now=11.0).count("b") <= 4  # but not all of them


def test_a_flow_pays_for_a_turn_longer_than_expected() -> None:
    order = FairQueueing[str](overrun_s=0.0)
    backlog(order, "ab")
    assert turns(order, count=4, turn_s={"a": 1.0, "b": 1.0}) == "abba"
    assert turns(order, count=7, turn_s={"a": 5.0, "b": 1.0}, now=4.0) == "abbbbbb"


def test_within_the_overrun_the_warm_flow_goes_first() -> None:
    warm = {"b"}
    order = FairQueueing[str](overrun_s=2.5, is_warm=warm.__contains__)
    backlog(order, "ab")
    assert turns(order, count=5, turn_s={"a": 1.0, "b": 1.0}) == "bbbaa"


def test_the_turn_is_held_for_an_expected_call_but_no_longer_than_calls_run() -> None:
    order = FairQueueing[str](overrun_s=1.0, hold_s=0.5)
    order.wait("a", "a", 0.0)
    first = order.next(0.0)
    assert first is not None
    order.wait("b", "b", 0.05)
    order.end(first, 0.1)
    assert order.next(0.1) is None
    assert order.next_check_at(0.1) == pytest.approx(0.2)  # its call took 0.1 s
    order.wait("a", "a", 0.15)
    second = order.next(0.15)
    assert second is not None
    assert second.flow == "a"
    order.end(second, 0.25)
    assert order.next(0.25) is None
    third = order.next(order.next_check_at(0.25))
    assert third is not None
    assert third.flow == "b"


def test_more_may_begin_in_a_turn_until_others_have_a_better_claim() -> None:
    order = FairQueueing[str](overrun_s=1.0)
    order.wait("a", "a", 0.0)
    turn = order.next(0.0)
    assert turn is not None
    assert order.may_continue(turn, 50.0)  # no other flow waits
    order.wait("b", "b", 0.5)
    assert (order.may_continue(turn, 0.9), order.may_continue(turn, 1.2)) == (True, False)


def test_a_flow_that_leaves_is_not_next() -> None:
    order = FairQueueing[str]()
    calls = ["a1", "a2"]
    for call in calls:
        order.wait("a", call, 0.0)
    order.leave("a", calls[0])
    turn = order.next(0.0)
    assert turn is not None
    assert (turn.what, order.next(0.0)) == ("a2", None)


def test_the_shortest_and_unknown_flows_go_first() -> None:
    order = ShortestFirst[str]()
    backlog(order, "ab", each=1)
    turns(order, count=2, turn_s={"a": 2.0, "b": 1.0})
    backlog(order, "abc", each=2, now=3.0)
    assert turns(order, count=6, turn_s={"a": 2.0, "b": 1.0, "c": 3.0}, now=3.0) == "cbbaac"
