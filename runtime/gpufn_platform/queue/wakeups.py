"""Doorbells: a call was queued. To the controller, that a Function may need a worker; to runners, where to look.

Runners have a standing pull of the sync queue of class normal, so a call in that one rings for the controller only.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.spec.priority import QUEUES, QueueKind
from gpufn_platform.bus.connection import Bus

_WORDS = {kind: f"{'sync' if kind.is_sync else 'async'} {kind.priority}".encode() for kind in QUEUES}
_APART_S: Final = 0.002  # the controller looks at the whole function at each ring
_BY_WORD = {word: kind for kind, word in _WORDS.items()}


def ring(bus: Bus, function: str, queue: QueueKind) -> None:
    """Raises nothing: the call is queued, whoever hears of it, and who is rung for looks by himself as well."""
    with contextlib.suppress(BusUnavailable):
        bus.publish(subjects.doorbell(function), _WORDS[queue])


class Ringer:
    """Rings for one of many that submit: at once, but for each queue not twice within 2 ms; who comes meanwhile is rung
    for at their end."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._others_came: dict[tuple[str, QueueKind], bool] = {}  # meanwhile, by what was rung for

    def ring(self, function: str, queue: QueueKind) -> None:
        key = function, queue
        if key in self._others_came:
            self._others_came[key] = True
            return
        ring(self._bus, function, queue)
        self._others_came[key] = False
        asyncio.get_running_loop().call_later(_APART_S, self._rested, key)

    def _rested(self, key: tuple[str, QueueKind]) -> None:
        if self._others_came.pop(key):
            self.ring(*key)


def queue_of(payload: bytes) -> QueueKind | None:
    """Which queue a doorbell rings for; None when it does not say."""
    return _BY_WORD.get(payload)
