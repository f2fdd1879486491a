"""Doorbells: a call was queued. To the controller, that a Function may need a worker; to runners, where to look.

Runners have a standing pull of the sync queue of class normal, so a call in that one rings for the controller only.
"""

from __future__ import annotations

from gpufn.bus.connection import Bus
from gpufn.priority import QUEUES, QueueKind
from gpufn.protocol import subjects

_WORDS = {kind: f"{'sync' if kind.is_sync else 'async'} {kind.priority}".encode() for kind in QUEUES}
_BY_WORD = {word: kind for kind, word in _WORDS.items()}


def ring(bus: Bus, function: str, queue: QueueKind) -> None:
    """Raises BusUnavailable."""
    bus.publish(subjects.doorbell(function), _WORDS[queue])


def queue_of(payload: bytes) -> QueueKind | None:
    """Which queue a doorbell rings for; None when it does not say."""
    return _BY_WORD.get(payload)
