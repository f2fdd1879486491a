from __future__ import annotations

import pytest

from gpufn_runtime.runner.order import QueueOrder


@pytest.mark.parametrize(
    ("async_waits", "sync_pending", "offers"),
    [
        (False, 0, [False] * 4),  # nothing is known to wait
        (False, 9, [False] * 4),
        (True, 0, [True] * 4),  # no caller waits
        (True, 9, [False] * 7 + [True] + [False] * 7 + [True]),  # callers first, but every eighth slot
    ],
)
def test_which_queue_a_free_slot_is_offered_to(async_waits: bool, sync_pending: int, offers: list[bool]) -> None:
    order = QueueOrder()
    order.async_waits, order.sync_pending = async_waits, sync_pending
    assert [order.offers_async_first() for _ in offers] == offers
