"""Choice of the queue that gets a free slot. Pure; times are in unix seconds.

1. The higher class goes first: hi, normal, low.
2. Within a class the sync queue goes first, because callers wait; but every eighth slot goes to the async queue.
3. Aging: every fourth slot goes to the queue whose first call has waited longest, if that is a minute or more. So no
   class starves, and a class with a long backlog does not hold up the classes above it.

A queue's state is known from its last delivery, a wakeup or an empty poll. The call behind a delivery is assumed to be
as old as that delivery. It is younger in fact; its own delivery corrects that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpufn_core.spec.priority import Priority, QueueKind

AGED_AFTER_S: Final = 60.0
_AGED_EVERY: Final = 4
_ASYNC_EVERY: Final = 8

STANDING: Final = QueueKind(Priority.NORMAL, is_sync=True)  # the standing pull's queue; the others are polled


def choose(waiting: Mapping[QueueKind, float], turn: int, now: float) -> QueueKind:
    """Return the queue whose first call goes next. `waiting` maps queues (at least one) to the time since which calls
    have waited there. `turn` counts the slots for which several queues competed."""
    highest = min(waiting, key=_rank)
    if turn % _AGED_EVERY == _AGED_EVERY - 1:
        oldest = min(waiting, key=lambda queue: (waiting[queue], _rank(queue)))
        if now - waiting[oldest] >= AGED_AFTER_S:
            return oldest
    if turn % _ASYNC_EVERY == _ASYNC_EVERY - 1:
        submitted = QueueKind(highest.priority, is_sync=False)
        return submitted if submitted in waiting else highest
    return highest


def _rank(queue: QueueKind) -> tuple[int, bool]:
    return queue.priority.rank, not queue.is_sync


class QueueOrder:
    """State of a Revision's queues, and the choice between them."""

    __slots__ = ("_chosen_by_age", "_handed_back", "_known_waiting", "_turn", "_waiting_since")

    def __init__(self) -> None:
        self._waiting_since: dict[QueueKind, float] = {}  # queues in which calls wait, or may wait
        self._known_waiting: set[QueueKind] = set()  # those in which calls are known to wait
        self._handed_back: set[QueueKind] = set()  # those with a handed-back call that no delivery's `pending` counts
        self._chosen_by_age: set[QueueKind] = set()  # those being polled because of their age
        self._turn = 0

    def mark_maybe_waiting(self, queue: QueueKind, now: float) -> None:
        """Record that the queue has not been checked for a while."""
        self._waiting_since.setdefault(queue, now)

    def mark_waiting(self, queue: QueueKind, since: float) -> None:
        """Record a wakeup: calls wait in the queue."""
        self._waiting_since.setdefault(queue, since)
        self._known_waiting.add(queue)

    def handed_back(self, queue: QueueKind, since: float) -> None:
        """Record that a delivery was handed back to the queue, because there was no room."""
        self.mark_waiting(queue, since)
        if queue != STANDING:  # the next delivery counts it
            self._handed_back.add(queue)

    def delivered(self, queue: QueueKind, since: float, pending: int, *, is_redelivered: bool = False) -> None:
        """Record a delivery of a call that had waited since `since`. `pending` more calls are behind it; redelivered
        calls are not included (due retries, and calls of a runner that died), of which this may be one."""
        self._chosen_by_age.discard(queue)
        if pending or queue in self._handed_back:
            self._waiting_since[queue] = since
            self._known_waiting.add(queue)
        elif is_redelivered and queue != STANDING:  # others may follow; an empty poll ends the search
            self._waiting_since[queue] = since
            self._known_waiting.discard(queue)
        else:
            self.mark_empty(queue)

    def mark_empty(self, queue: QueueKind) -> None:
        if queue in self._chosen_by_age:  # let another aged queue have this turn
            self._chosen_by_age.discard(queue)
            self._turn |= _AGED_EVERY - 1
        self._waiting_since.pop(queue, None)
        self._known_waiting.discard(queue)
        self._handed_back.discard(queue)

    def next(self, now: float) -> QueueKind | None:
        """Return the queue to offer one slot to, or None if no calls are known to wait."""
        if not self._waiting_since:
            return None
        chosen = choose(self._waiting_since, self._turn, now)
        if len(self._waiting_since) > 1:
            if self._turn % _AGED_EVERY == _AGED_EVERY - 1 and now - self._waiting_since[chosen] >= AGED_AFTER_S:
                self._chosen_by_age.add(chosen)
            self._turn += 1
        return chosen

    def to_poll(self) -> QueueKind | None:
        """Return the highest polled queue in which calls may wait."""
        return min(self._waiting_since.keys() - {STANDING}, key=_rank, default=None)

    def could_overtake_callers(self) -> bool:
        """Return whether calls of a lower rank than the standing queue wait, while that queue's state is unknown."""
        return STANDING not in self._known_waiting and any(
            _rank(queue) > _rank(STANDING) for queue in self._known_waiting
        )

    def others_wait(self, priority: Priority) -> bool:
        """Return whether calls of this class or a higher one are known to wait."""
        for queue in self._known_waiting:  # noqa: SIM110  faster; each fast-path call needs it
            if not priority.is_above(queue.priority):
                return True
        return False
