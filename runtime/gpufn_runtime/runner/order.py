"""Which queue a free slot is offered to: the sync queue, where callers wait, or the async one.

Sync goes first. While async calls are known to wait, a slot is offered to them when the last sync delivery left its
queue empty, and every eighth time in any case, so that neither starves the other.
"""

from __future__ import annotations

_ASYNC_TURN = 8


class QueueOrder:
    __slots__ = ("_offers", "async_waits", "sync_pending")

    def __init__(self) -> None:
        self.async_waits = False  # a doorbell or a delivery said so, and no empty poll has said otherwise since
        self.sync_pending = 0  # behind the last sync delivery
        self._offers = 0

    def offers_async_first(self) -> bool:
        """Decide for one slot that became free."""
        if not self.async_waits:
            return False
        self._offers += 1
        return self.sync_pending == 0 or self._offers % _ASYNC_TURN == 0
