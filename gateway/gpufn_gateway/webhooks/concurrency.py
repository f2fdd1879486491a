"""Concurrent deliveries per webhook receiver, limited so that a hanging receiver does not block the others. Pure.

The deliveries of a team are limited in the same way: a team can name any number of receivers that hang.

A fast receiver has no limit. When `MAX_CONCURRENT` of its deliveries have waited for `SLOW_S`, the receiver is slow.
Then it is limited to `MAX_CONCURRENT` until a delivery is answered sooner. Further deliveries are postponed, each by a
moment more than the previous one. So a long queue for a slow receiver costs little and keeps it busy.

`now` is in seconds of any monotonic clock.

>>> receivers = Receivers()
>>> any(receivers.begin("a.example", now=0.0) for _ in range(MAX_CONCURRENT + 1))
False
>>> receivers.begin("a.example", now=SLOW_S), receivers.begin("a.example", now=SLOW_S)
(5.0, 5.01)
>>> receivers.end("a.example", started_at=0.0, now=SLOW_S); receivers.end("a.example", started_at=0.0, now=SLOW_S)
>>> receivers.begin("a.example", now=SLOW_S)
0.0
"""

from __future__ import annotations

from typing import Final

MAX_CONCURRENT: Final = 8
SLOW_S: Final = 2.0
RETRY_AFTER_S: Final = 5.0
MIN_INTERVAL_S: Final = 0.01


class _Receiver:
    __slots__ = ("is_slow", "retry_at", "started")

    def __init__(self) -> None:
        self.started: list[float] = []  # start times of the deliveries in flight
        self.is_slow = False
        self.retry_at = 0.0  # time of the last postponed delivery


class Receivers:
    """At most `limit` deliveries at a time to a slow receiver, or of a team whose receivers are slow."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit or MAX_CONCURRENT
        self._receivers: dict[str, _Receiver] = {}  # with deliveries in flight

    def begin(self, receiver: str, now: float) -> float:
        """Return 0 if the delivery may start; then call `end`. Otherwise return the seconds to wait before retrying."""
        state = self._receivers.setdefault(receiver, _Receiver())
        state.is_slow |= sum(now - started_at >= SLOW_S for started_at in state.started) >= self._limit
        if state.is_slow and len(state.started) >= self._limit:
            state.retry_at = max(now + RETRY_AFTER_S, state.retry_at + MIN_INTERVAL_S)
            return state.retry_at - now
        state.started.append(now)
        return 0.0

    def end(self, receiver: str, started_at: float, now: float) -> None:
        """Record that a delivery was answered or failed."""
        self._receivers[receiver].is_slow = now - started_at >= SLOW_S
        self.withdraw(receiver, started_at)

    def withdraw(self, receiver: str, started_at: float) -> None:
        """Undo a `begin` whose delivery did not start."""
        state = self._receivers[receiver]
        state.started.remove(started_at)
        if not state.started:
            del self._receivers[receiver]
