from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn_core.spec.priority import QUEUES, Priority, QueueKind
from gpufn_runtime.runner.dispatch.queue_choice import AGED_AFTER_S, STANDING, QueueOrder, choose

SYNC_HI, ASYNC_HI, SYNC, ASYNC, SYNC_LOW, ASYNC_LOW = QUEUES
NOW = 1000.0
YOUNG, AGED, OLDER = NOW - 1, NOW - AGED_AFTER_S, NOW - AGED_AFTER_S - 1


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        ({ASYNC: YOUNG}, [ASYNC] * 8),
        ({SYNC: YOUNG, ASYNC: YOUNG}, [SYNC] * 7 + [ASYNC]),  # callers go first, except for every eighth slot
        ({SYNC: YOUNG, ASYNC_LOW: YOUNG}, [SYNC] * 8),  # strict between classes
        ({ASYNC_HI: YOUNG, SYNC: YOUNG, SYNC_LOW: YOUNG}, [ASYNC_HI] * 8),
        ({SYNC_HI: YOUNG, ASYNC_LOW: AGED}, [SYNC_HI] * 3 + [ASYNC_LOW] + [SYNC_HI] * 3 + [ASYNC_LOW]),
        ({SYNC_HI: YOUNG, SYNC: AGED, ASYNC_LOW: OLDER}, [SYNC_HI] * 3 + [ASYNC_LOW] + [SYNC_HI] * 3 + [ASYNC_LOW]),
        ({SYNC_HI: OLDER, ASYNC_LOW: AGED}, [SYNC_HI] * 8),  # older, and of the higher class
    ],
)
def test_which_queue_a_free_slot_is_offered_to(waiting: dict[QueueKind, float], chosen: list[QueueKind]) -> None:
    assert [choose(waiting, turn, NOW) for turn in range(8)] == chosen


def test_the_last_report_about_a_queue_counts() -> None:
    order = QueueOrder()
    assert order.next(NOW) is None
    order.mark_maybe_waiting(ASYNC, NOW)
    order.mark_waiting(ASYNC_LOW, NOW)
    assert order.next(NOW) == order.to_poll() == ASYNC
    order.mark_empty(ASYNC)
    assert order.next(NOW) == ASYNC_LOW
    order.delivered(ASYNC_LOW, NOW - 5, pending=1)
    assert order.next(NOW) == ASYNC_LOW
    order.delivered(ASYNC_LOW, NOW - 4, pending=0)
    assert order.next(NOW) is None


def test_a_queue_with_a_returned_call_is_not_empty_until_a_poll_shows_it() -> None:
    order = QueueOrder()
    order.handed_back(ASYNC, NOW)
    order.delivered(ASYNC, NOW, pending=0)
    assert order.to_poll() == ASYNC
    order.mark_empty(ASYNC)
    assert order.to_poll() is None
    order.handed_back(STANDING, NOW)
    order.delivered(STANDING, NOW, pending=0)  # its next delivery counts it
    assert order.next(NOW) is None


def test_a_redelivered_call_may_precede_calls_that_pending_does_not_count() -> None:
    order = QueueOrder()
    order.delivered(ASYNC, NOW, pending=0, is_redelivered=True)  # a retry that is due; others may be due too
    assert order.next(NOW) == order.to_poll() == ASYNC
    assert not order.others_wait(ASYNC.priority)  # no calls are known to wait there
    order.mark_empty(ASYNC)
    assert order.next(NOW) is None
    order.delivered(STANDING, NOW, pending=0, is_redelivered=True)  # its standing credits will bring them
    assert order.next(NOW) is None


def test_an_empty_queue_that_may_have_aged_uses_no_turn() -> None:
    order = QueueOrder()
    for queue in (ASYNC_HI, ASYNC_LOW):
        order.mark_waiting(queue, NOW - AGED_AFTER_S)
    for queue in (ASYNC, SYNC_LOW):
        order.mark_maybe_waiting(queue, NOW - AGED_AFTER_S - 1)
    order.delivered(ASYNC_HI, NOW, pending=100)
    assert [order.next(NOW) for _ in range(4)] == [ASYNC_HI, ASYNC_HI, ASYNC_HI, ASYNC]
    order.mark_empty(ASYNC)
    assert order.next(NOW) == SYNC_LOW
    order.mark_empty(SYNC_LOW)
    assert [order.next(NOW) for _ in range(2)] == [ASYNC_LOW, ASYNC_HI]


def test_a_call_outside_the_queues_waits_for_its_class_and_higher_classes() -> None:
    order = QueueOrder()
    order.mark_waiting(ASYNC, NOW)
    order.mark_maybe_waiting(ASYNC_HI, NOW)  # unknown
    assert [order.others_wait(priority) for priority in Priority] == [False, True, True]


@pytest.mark.parametrize(
    ("waiting", "could"),
    [((), False), ((ASYNC_HI,), False), ((ASYNC,), True), ((ASYNC_HI, SYNC_LOW), True), ((SYNC, SYNC_LOW), False)],
)
def test_unknown_callers_could_be_overtaken_by_callers_behind_them(waiting: tuple[QueueKind, ...], could: bool) -> None:
    order = QueueOrder()
    order.mark_maybe_waiting(ASYNC_LOW, NOW)
    for queue in waiting:
        order.mark_waiting(queue, NOW)
    assert order.could_overtake_callers() is could


class Stage:
    """One slot, calls of one second each, and queues that reveal only what NATS does."""

    def __init__(self) -> None:
        self.order = QueueOrder()
        self.now = NOW
        self.queues: dict[QueueKind, deque[float]] = {queue: deque() for queue in QUEUES}
        self.served: list[tuple[QueueKind, float, float]] = []  # queue, submitted, started

    def submit(self, queue: QueueKind) -> None:
        self.queues[queue].append(self.now)
        self.order.mark_waiting(queue, self.now)

    def serve(self) -> None:
        while (queue := self.order.next(self.now)) is not None:
            if not self.queues[queue]:
                self.order.mark_empty(queue)
                continue
            submitted = self.queues[queue].popleft()
            self.order.delivered(queue, submitted, len(self.queues[queue]))
            self.served.append((queue, submitted, self.now))
            break
        self.now += 1.0


@given(st.lists(st.lists(st.sampled_from(QUEUES), max_size=3), max_size=200))
def test_every_call_is_served_in_the_order_of_its_queue_and_soon_once_it_has_aged(
    seconds: list[list[QueueKind]],
) -> None:
    stage = Stage()
    for queues in seconds:
        for queue in queues:
            stage.submit(queue)
        stage.serve()
    while any(stage.queues.values()):
        stage.serve()
    for queue in QUEUES:
        submitted = [at for each, at, _ in stage.served if each == queue]
        assert submitted == sorted(submitted)
    for queue, at, started in stage.served:
        # Every fourth slot goes to the call that has waited longest: first to the earlier ones, and then to this one.
        older = sum(other_at <= at and other_started > at for _, other_at, other_started in stage.served)
        assert started - at <= AGED_AFTER_S + 4 * older + 4, queue


@given(st.integers(1, 300))
def test_a_class_that_others_keep_from_the_slot_gets_every_fourth_once_it_has_aged(calls: int) -> None:
    stage = Stage()
    for _ in range(calls):
        stage.submit(ASYNC_LOW)
    for _ in range(int(AGED_AFTER_S) + 4 * calls + 4):
        stage.submit(SYNC_HI)
        stage.serve()
    assert not stage.queues[ASYNC_LOW]
    low = [started for queue, _, started in stage.served if queue == ASYNC_LOW]
    assert low[0] - NOW <= AGED_AFTER_S + 4
    assert low[-1] - low[0] <= 4 * calls
