"""Priority classes of calls, and the six queues of a revision: per class one for synchronous calls (whose caller waits)
and one for submitted calls."""

from __future__ import annotations

import enum
from typing import NamedTuple

from gpufn_core.errors import InvalidInput


class Priority(enum.StrEnum):
    """The class of a call, the highest first.

    >>> [priority.value for priority in Priority], Priority.HI.is_above(Priority.NORMAL)
    (['hi', 'normal', 'low'], True)
    """

    HI = "hi"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """The position among the classes; 0 is the highest."""
        return _RANKS[self]

    def is_above(self, other: Priority) -> bool:
        return self.rank < other.rank


_RANKS = {priority: rank for rank, priority in enumerate(Priority)}


class QueueKind(NamedTuple):
    """One of a revision's queues. `is_sync`: for calls whose caller waits; otherwise for submitted calls."""

    priority: Priority
    is_sync: bool


QUEUES = tuple(QueueKind(priority, is_sync) for priority in Priority for is_sync in (True, False))


def priority_of(text: str, field: str | None = None) -> Priority:
    """Return the class of this name. Raises InvalidInput with `field`.

    >>> priority_of("low").value
    'low'
    """
    try:
        return Priority(text)
    except ValueError:
        raise InvalidInput(f"a call's priority is hi, normal or low, not {text!r:.42}", field=field) from None
