"""Wakeups after a call was queued. The controller learns that a function may need a worker, runners learn where to
poll.

Runners have a standing pull on the sync queue of normal priority, so a call there only wakes the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.spec.priority import QUEUES, QueueKind
from gpufn_platform.bus.connection import Bus

_PAYLOADS = {kind: f"{'sync' if kind.is_sync else 'async'} {kind.priority}".encode() for kind in QUEUES}
_MAX_DIGITS: Final = 18
_MIN_INTERVAL_S: Final = 0.002  # the controller checks the whole function at each wakeup
_BY_PAYLOAD = {payload: kind for kind, payload in _PAYLOADS.items()}


def payload(revision: int, queue: QueueKind | None = None) -> bytes:
    """Return the payload of a wakeup for a revision, and for one of its queues if only runners without a standing pull
    on it have to poll."""
    return b"%d" % revision if queue is None else b"%s %d" % (_PAYLOADS[queue], revision)


def send_wakeup(bus: Bus, function: str, queue: QueueKind, revision: int) -> None:
    """Send a wakeup. Never raises: the call is queued anyway, and receivers also poll."""
    with contextlib.suppress(BusUnavailable):
        bus.publish(subjects.wakeup(function), payload(revision, queue))


class WakeupSender:
    """Rate-limits wakeups of a process that submits many calls: at most one per queue within 2 ms. Further ones are
    merged into one at the end of that interval."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._pending: dict[tuple[str, QueueKind, int], bool] = {}  # wakeup during the interval

    def send_wakeup(self, function: str, queue: QueueKind, revision: int) -> None:
        key = function, queue, revision
        if key in self._pending:
            self._pending[key] = True
            return
        send_wakeup(self._bus, function, queue, revision)
        self._pending[key] = False
        asyncio.get_running_loop().call_later(_MIN_INTERVAL_S, self._on_interval_over, key)

    def _on_interval_over(self, key: tuple[str, QueueKind, int]) -> None:
        if self._pending.pop(key):
            self.send_wakeup(*key)


def queue_of(payload: bytes) -> QueueKind | None:
    """Return the queue of a wakeup, or None if the payload does not name it."""
    return _BY_PAYLOAD.get(payload.rpartition(b" ")[0])


def revision_of(payload: bytes) -> int | None:
    """Return the revision of a wakeup, or None if the payload does not name it."""
    number = payload.rpartition(b" ")[2]
    return int(number) if number.isdigit() and len(number) < _MAX_DIGITS else None
