"""Which of a Revision's queues a free slot is offered to. Pure; times are in unix seconds.

1. the higher class goes first: hi, normal, low
2. within a class the sync queue goes first, where callers wait; but every eighth slot is the async one's
3. ageing: every fourth slot goes to the queue whose first call has waited the longest, when that is a minute or more.
   So no class starves, and none with a long backlog holds up those above it

What is known of a queue is what its last delivery, a doorbell or an empty poll said of it. The call behind a delivery
is taken to be as old as that one was: it is younger, and its own delivery puts that right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpufn_core.spec.priority import Priority, QueueKind

PATIENCE_S: Final = 60.0
_AGED_TURN: Final = 4
_ASYNC_TURN: Final = 8

STANDING: Final = QueueKind(Priority.NORMAL, is_sync=True)  # its credits stand at the server; the others are polled


def first(waiting: Mapping[QueueKind, float], turn: int, now: float) -> QueueKind:
    """The queue whose first call goes next, of those in which calls have waited since the given time; there is at least
    one. `turn` counts the slots that more than one queue has waited for."""
    highest = min(waiting, key=_place)
    if turn % _AGED_TURN == _AGED_TURN - 1:
        oldest = min(waiting, key=lambda queue: (waiting[queue], _place(queue)))
        if now - waiting[oldest] >= PATIENCE_S:
            return oldest
    if turn % _ASYNC_TURN == _ASYNC_TURN - 1:
        submitted = QueueKind(highest.priority, is_sync=False)
        return submitted if submitted in waiting else highest
    return highest


def _place(queue: QueueKind) -> tuple[int, bool]:
    return queue.priority.rank, not queue.is_sync


class QueueOrder:
    """What is known of a Revision's queues, and the choice between them."""

    __slots__ = ("_by_age", "_handed_back", "_known", "_since", "_turn")

    def __init__(self) -> None:
        self._since: dict[QueueKind, float] = {}  # calls wait there, or may
        self._known: set[QueueKind] = set()  # of these: they do
        self._handed_back: set[QueueKind] = set()  # and one of them is counted by no delivery's `pending`
        self._by_age: set[QueueKind] = set()  # it is being looked at because of its age
        self._turn = 0

    def may_wait(self, queue: QueueKind, now: float) -> None:
        """Nobody has looked there for a while."""
        self._since.setdefault(queue, now)

    def waits(self, queue: QueueKind, since: float) -> None:
        """A doorbell says so."""
        self._since.setdefault(queue, since)
        self._known.add(queue)

    def handed_back(self, queue: QueueKind, since: float) -> None:
        """A delivery from there found no room: it is back."""
        self.waits(queue, since)
        if queue != STANDING:  # its next delivery counts it
            self._handed_back.add(queue)

    def delivered(self, queue: QueueKind, since: float, pending: int, *, again: bool = False) -> None:
        """A call that had waited `since` then came from there; `pending` more are behind it, without those that come
        `again`, as it does: retries that are due, and what a runner that died had."""
        self._by_age.discard(queue)
        if pending or queue in self._handed_back:
            self._since[queue] = since
            self._known.add(queue)
        elif again and queue != STANDING:  # where one comes again others may; a poll that is empty ends it
            self._since[queue] = since
            self._known.discard(queue)
        else:
            self.is_empty(queue)

    def is_empty(self, queue: QueueKind) -> None:
        if queue in self._by_age:  # another aged one has its turn
            self._by_age.discard(queue)
            self._turn |= _AGED_TURN - 1
        self._since.pop(queue, None)
        self._known.discard(queue)
        self._handed_back.discard(queue)

    def next(self, now: float) -> QueueKind | None:
        """The queue that one slot is offered to; None when nothing is known to wait."""
        if not self._since:
            return None
        chosen = first(self._since, self._turn, now)
        if len(self._since) > 1:
            if self._turn % _AGED_TURN == _AGED_TURN - 1 and now - self._since[chosen] >= PATIENCE_S:
                self._by_age.add(chosen)
            self._turn += 1
        return chosen

    def to_poll(self) -> QueueKind | None:
        """The highest of the polled queues in which calls may wait."""
        return min(self._since.keys() - {STANDING}, key=_place, default=None)

    def could_overtake_callers(self) -> bool:
        """Calls are known to wait that go behind those of the standing queue, of which nothing is known."""
        return STANDING not in self._known and any(_place(queue) > _place(STANDING) for queue in self._known)

    def others_wait(self, priority: Priority) -> bool:
        """Calls of this class or a higher one are known to wait."""
        return any(not priority.is_above(queue.priority) for queue in self._known)
