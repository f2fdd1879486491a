"""Whose turn it is on a GPU that several functions share by time. Pure: `now` is seconds of any one clock.

A turn is leave to use the GPU; `at_once` of them are on at a time. What waits for one stands in its function's *flow*:

    1. `wait(flow, what, now)`: it waits, behind others of its flow
    2. `next(now)`: who begins now; again and again, until it is None
    3. `end(turn, now)`: the GPU is free of it
    4. `ask_again_at(now)`: when `next` may say something else though nothing happened

Three orders. `Arrivals` is first come, first served; `ShortestFirst` takes the function whose turns were the shortest;
neither is fair. `FairQueueing` is MQFQ-Sticky (arXiv 2507.08954; MQFQ is of USENIX ATC 2019):

    tag      of a flow: seconds of service that it has had; what a turn will take is estimated when it begins and put
             right when it ends. A flow that comes back begins at V, if it is behind: what nobody wanted is not saved up
    V        the virtual time: the least tag of the flows that are here
    here     a flow that waits; and, for `hold_s`, one that waited for nothing when its turn ended, because its next
             call is often on its way
    sticky   of the flows with a tag of at most V + overrun_s the one goes on that was served last; then come those
             that are warm on this GPU, then the others; of equals the one with the least tag
    held     when that is one whose call is on its way, the turn stays free for it

Of two flows that wait all the time neither gets more than 2 * overrun_s and one turn of each ahead of the other, as far
as the estimates are right; each wrong one adds its error. So no flow that waits is passed over for longer than that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

T = TypeVar("T")

TURNS_PER_GPU: Final = 2  # unless a node's operator says otherwise

_WEIGHT: Final = 0.2  # of the newest turn in the mean
_LEAST_S: Final = 0.001  # that a turn is charged: one that costs nothing could go on for ever


class Turn(Generic[T]):
    """`what` may use the GPU since `began`."""

    __slots__ = ("began", "charged_s", "flow", "what")

    def __init__(self, flow: str, what: T, began: float, charged_s: float = 0.0) -> None:
        self.flow = flow
        self.what = what
        self.began = began
        self.charged_s = charged_s  # of its flow's tag, as long as it is on


class Order(Protocol[T]):
    """Who is next."""

    def wait(self, flow: str, what: T, now: float) -> None: ...
    def next(self, now: float) -> Turn[T] | None: ...
    def end(self, turn: Turn[T], now: float) -> None: ...
    def ask_again_at(self, now: float) -> float: ...


class _Flow(Generic[T]):
    __slots__ = ("ended_at", "mean_s", "name", "running", "tag", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.waiting: deque[tuple[float, T]] = deque()  # with the time since when
        self.running = 0
        self.mean_s: float | None = None  # of a turn; None as long as none has ended
        self.ended_at = -math.inf
        self.tag = 0.0

    @property
    def since(self) -> float:
        return self.waiting[0][0] if self.waiting else self.ended_at

    def measured(self, turn_s: float) -> None:
        self.mean_s = turn_s if self.mean_s is None else self.mean_s + _WEIGHT * (turn_s - self.mean_s)


class _Flows(Generic[T]):
    """What the orders have in common: flows, and how many turns are on."""

    def __init__(self, at_once: int = 1) -> None:
        self._at_once = at_once
        self._running = 0
        self._flows: dict[str, _Flow[T]] = {}

    def wait(self, flow: str, what: T, now: float) -> None:
        self._flow(flow).waiting.append((now, what))

    def leave(self, flow: str, what: T) -> None:
        """It waits no longer."""
        found = self._flow(flow)
        found.waiting = deque(each for each in found.waiting if each[1] is not what)

    def forget(self, flow: str) -> None:
        """Nothing of it will come any more."""
        self._flows.pop(flow, None)

    def end(self, turn: Turn[T], now: float) -> None:
        self._running -= 1
        flow = self._flow(turn.flow)
        flow.running -= 1
        flow.ended_at = now
        flow.measured(now - turn.began)

    def ask_again_at(self, now: float) -> float:
        """`math.inf` when nothing changes by itself."""
        return math.inf

    def _flow(self, name: str) -> _Flow[T]:
        found = self._flows.get(name)
        if found is None:
            found = self._flows[name] = _Flow(name)
        return found

    def _waiting(self) -> list[_Flow[T]]:
        return [flow for flow in self._flows.values() if flow.waiting]

    def _begin(self, flow: _Flow[T], now: float) -> Turn[T]:
        self._running += 1
        flow.running += 1
        return Turn(flow.name, flow.waiting.popleft()[1], now)


class Arrivals(_Flows[T]):
    """First come, first served.

    >>> order = Arrivals[str]()
    >>> order.wait("f", "f1", 0.0); order.wait("f", "f2", 0.1); order.wait("g", "g1", 0.2)
    >>> turn = order.next(0.2); turn.what, order.next(0.2)
    ('f1', None)
    >>> order.end(turn, 1.0); order.next(1.0).what
    'f2'
    """

    def next(self, now: float) -> Turn[T] | None:
        waiting = self._waiting()
        if not waiting or self._running >= self._at_once:
            return None
        return self._begin(min(waiting, key=lambda flow: flow.since), now)


class ShortestFirst(_Flows[T]):
    """The function whose turns have been the shortest; one of which nothing is known yet comes first."""

    def next(self, now: float) -> Turn[T] | None:
        waiting = self._waiting()
        if not waiting or self._running >= self._at_once:
            return None
        return self._begin(min(waiting, key=lambda flow: (flow.mean_s or 0.0, flow.since)), now)


class FairQueueing(_Flows[T]):
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
        found = self._flow(flow)
        if not (found.waiting or found.running or self._is_awaited(found, now)):
            found.tag = max(found.tag, self._virtual_s)
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

    def may_go_on(self, turn: Turn[T], now: float) -> bool:
        """Whether more may begin in this turn, which is on, or others that wait have a better claim by now."""
        others = [flow.tag for flow in self._waiting() if flow.name != turn.flow]
        ahead_s = max(0.0, now - turn.began - turn.charged_s)  # of what it was charged
        return not others or self._flow(turn.flow).tag + ahead_s <= min(others) + self._overrun_s

    def ask_again_at(self, now: float) -> float:
        if self._running >= self._at_once or not self._waiting():
            return math.inf
        ends = (flow.ended_at + self._held_s(flow) for flow in self._flows.values() if self._is_awaited(flow, now))
        return min(ends, default=math.inf)

    def _entitled(self, now: float) -> list[_Flow[T]]:
        """Those whom the free turns belong to, the first of them first."""
        free = self._at_once - self._running
        here = [flow for flow in self._flows.values() if flow.waiting or self._is_awaited(flow, now)]
        if free <= 0 or not here:
            return []
        least = min(flow.tag for flow in here)
        self._virtual_s = max(self._virtual_s, least)
        limit = least + self._overrun_s

        def claim(flow: _Flow[T]) -> tuple[bool, bool, bool, float, float]:
            is_cold = not self._is_warm(flow.name)
            return flow.tag > limit, flow is not self._last, is_cold, flow.tag, flow.since

        return sorted(here, key=claim)[:free]

    def _is_awaited(self, flow: _Flow[T], now: float) -> bool:
        return not (flow.waiting or flow.running) and now < flow.ended_at + self._held_s(flow)

    def _held_s(self, flow: _Flow[T]) -> float:
        """The GPU does not stand still for longer than what comes will take."""
        return min(self._hold_s, flow.mean_s or 0.0)
