"""Scheduling of turns on a GPU that several functions share by time. Pure: `now` is in seconds of any one clock.

A turn is permission to use the GPU; up to `at_once` turns run at a time. Work that waits for a turn is queued in the
*flow* of its function:

    1. `wait(flow, what, now)`: queue `what` in its flow
    2. `next(now)`: start the next turn; call it until it returns None
    3. `end(turn, now)`: the turn is over
    4. `next_check_at(now)`: when `next` may return another turn although nothing happened

There are three orders. `Arrivals` is first come, first served. `ShortestFirst` picks the function with the shortest
turns. Neither is fair. `FairQueueing` is MQFQ-Sticky (arXiv 2507.08954; MQFQ is from USENIX ATC 2019):

    tag      of a flow: the seconds of service that it has received. A turn is charged an estimate when it starts,
             corrected when it ends. A flow that returns starts at V if its tag is behind: unused service is not saved
    V        the virtual time: the least tag of the active flows
    active   a flow that waits; or, for `hold_s`, one whose queue was empty when its turn ended, because its next call
             is often on its way
    sticky   of the flows with a tag of at most V + overrun_s, the one served last continues; then come the flows that
             are warm on this GPU, then the others; ties go to the least tag
    held     if the chosen flow is active only because its next call is expected, the turn stays free for it

Of two flows that always wait, neither gets ahead of the other by more than 2 * overrun_s plus one turn of each, if the
estimates are right. Each wrong estimate adds its error. No waiting flow is passed over for longer than that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

TURNS_PER_GPU: Final = 2  # the default of the node's setting

_WEIGHT: Final = 0.2  # weight of the newest turn in the moving average
_LEAST_S: Final = 0.001  # least charge for a turn; with free turns a flow could continue forever


class Turn(Generic[T]):
    """`what` may use the GPU since `began`."""

    __slots__ = ("began", "charged_s", "flow", "what")

    def __init__(self, flow: str, what: T, began: float, charged_s: float = 0.0) -> None:
        self.flow = flow
        self.what = what
        self.began = began
        self.charged_s = charged_s  # estimate that is included in its flow's tag while the turn runs


class _Flow(Generic[T]):
    __slots__ = ("ended_at", "mean_s", "name", "running", "tag", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: deque[tuple[float, T]] = deque()  # with the time of arrival
        self.running = 0
        self.mean_s: float | None = None  # of a turn; None until the first turn has ended
        self.ended_at = -math.inf
        self.tag = 0.0

    @property
    def since(self) -> float:
        return self.waiting[0][0] if self.waiting else self.ended_at

    def add_turn(self, turn_s: float) -> None:
        self.mean_s = turn_s if self.mean_s is None else self.mean_s + _WEIGHT * (turn_s - self.mean_s)


class Order(Generic[T]):
    """A policy that decides which flow gets the next turn: here the first by `_rank`."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._running = 0
        self._flows: dict[str, _Flow[T]] = {}

    def wait(self, flow: str, what: T, now: float) -> None:
        self._flow(flow).waiting.append((now, what))

    def leave(self, flow: str, what: T) -> None:
        """Remove `what` from the queue of its flow."""
        queue = self._flow(flow)
        queue.waiting = deque(entry for entry in queue.waiting if entry[1] is not what)

    def forget(self, flow: str) -> None:
        """Remove a flow that gets no further work."""
        self._flows.pop(flow, None)

    def next(self, now: float) -> Turn[T] | None:
        waiting = self._waiting()
        if not waiting or self._running >= self._at_once:
            return None
        return self._begin(min(waiting, key=self._rank), now)

    def _rank(self, flow: _Flow[T]) -> tuple[float, ...]:
        return (flow.since,)

    def end(self, turn: Turn[T], now: float) -> None:
        self._running -= 1
        flow = self._flow(turn.flow)
        flow.running -= 1
        flow.ended_at = now
        flow.add_turn(now - turn.began)

    def next_check_at(self, now: float) -> float:
        """Return the time of the next change; `math.inf` if nothing changes without an event."""
        return math.inf

    def _flow(self, name: str) -> _Flow[T]:
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(name)
        return flow

    def _waiting(self) -> list[_Flow[T]]:
        return [flow for flow in self._flows.values() if flow.waiting]

    def _begin(self, flow: _Flow[T], now: float) -> Turn[T]:
        self._running += 1
        flow.running += 1
        return Turn(flow.name, flow.waiting.popleft()[1], now)


class Arrivals(Order[T]):
    """First come, first served.

    >>> order = Arrivals[str]()
    >>> order.wait("f", "f1", 0.0); order.wait("f", "f2", 0.1); order.wait("g", "g1", 0.2)
    >>> turn = order.next(0.2); turn.what, order.next(0.2)
    ('f1', None)
    >>> order.end(turn, 1.0); order.next(1.0).what
    'f2'
    """


class ShortestFirst(Order[T]):
    """The function with the shortest turns first. A function without a finished turn comes first of all."""

    def _rank(self, flow: _Flow[T]) -> tuple[float, ...]:
        return flow.mean_s or 0.0, flow.since


class FairQueueing(Order[T]):
    """MQFQ-Sticky.

    >>> order = FairQueueing[str](overrun_s=0.0)
    >>> order.wait("f", "f1", 0.0); order.wait("f", "f2", 0.1); order.wait("g", "g1", 0.2)
    >>> turn = order.next(0.2); turn.what
    'f1'
    >>> order.end(turn, 1.0); order.next(1.0).what
    'g1'
    """

    def __init__(
        self,
        at_once: int = 1,
        *,
        overrun_s: float = 1.0,
        hold_s: float = 0.0,
        is_warm: Callable[[str], bool] = lambda flow: True,
    ) -> None:
        super().__init__(at_once)
        self._overrun_s = overrun_s
        self._hold_s = hold_s
        self._is_warm = is_warm
        self._virtual_s = 0.0
        self._last: _Flow[T] | None = None

    def wait(self, flow: str, what: T, now: float) -> None:
        entry = self._flow(flow)
        if not (entry.waiting or entry.running or self._is_expected(entry, now)):
            entry.tag = max(entry.tag, self._virtual_s)
        super().wait(flow, what, now)

    def next(self, now: float) -> Turn[T] | None:
        chosen = next((flow for flow in self._entitled(now) if flow.waiting), None)
        if chosen is None:
            return None
        self._last = chosen
        turn = self._begin(chosen, now)
        expected_s = self._overrun_s / 10 if chosen.mean_s is None else chosen.mean_s
        turn.charged_s = max(expected_s, _LEAST_S)
        chosen.tag += turn.charged_s
        return turn

    def end(self, turn: Turn[T], now: float) -> None:
        super().end(turn, now)
        self._flow(turn.flow).tag += max(now - turn.began, _LEAST_S) - turn.charged_s

    def may_continue(self, turn: Turn[T], now: float) -> bool:
        """Return whether more work may start in this running turn: no waiting flow has a better claim by now."""
        others = [flow.tag for flow in self._waiting() if flow.name != turn.flow]
        ahead_s = max(0.0, now - turn.began - turn.charged_s)  # beyond its estimate
        return not others or self._flow(turn.flow).tag + ahead_s <= min(others) + self._overrun_s

    def next_check_at(self, now: float) -> float:
        if self._running >= self._at_once or not self._waiting():
            return math.inf
        ends = (flow.ended_at + self._held_s(flow) for flow in self._flows.values() if self._is_expected(flow, now))
        return min(ends, default=math.inf)

    def _entitled(self, now: float) -> list[_Flow[T]]:
        """Return the flows that get the free turns, in order."""
        free = self._at_once - self._running
        active = [flow for flow in self._flows.values() if flow.waiting or self._is_expected(flow, now)]
        if free <= 0 or not active:
            return []
        least = min(flow.tag for flow in active)
        self._virtual_s = max(self._virtual_s, least)
        limit = least + self._overrun_s

        def claim(flow: _Flow[T]) -> tuple[bool, bool, bool, float, float]:
            is_cold = not self._is_warm(flow.name)
            return flow.tag > limit, flow is not self._last, is_cold, flow.tag, flow.since

        return sorted(active, key=claim)[:free]

    def _is_expected(self, flow: _Flow[T], now: float) -> bool:
        return not (flow.waiting or flow.running) and now < flow.ended_at + self._held_s(flow)

    def _held_s(self, flow: _Flow[T]) -> float:
        """Return how long to hold a turn for the flow: the GPU never idles for longer than the expected turn takes."""
        return min(self._hold_s, flow.mean_s or 0.0)
