from __future__ import annotations

import pytest

from gpufn_runtime.runner.core.slots import SlotPool


def test_a_slot_is_free_then_in_use_then_free_again() -> None:
    pool = SlotPool(2)
    pool.take()
    assert repr(pool) == "<SlotPool [1 in use, 1 free, 0 poisoned]>"
    pool.release()
    assert repr(pool) == "<SlotPool [0 in use, 2 free, 0 poisoned]>"


def test_slots_are_taken_as_often_as_allowed() -> None:
    pool = SlotPool(2, uses=3)
    pool.take()
    pool.take()
    pool.release()
    assert (pool.free, pool.is_spent) == (1, False)
    pool.take()
    assert (pool.free, pool.is_spent) == (0, True)
    pool.release()
    pool.poison()
    assert repr(pool) == "<SlotPool [0 in use, 0 free, 1 poisoned]>"


def test_a_worker_for_fewer_calls_than_slots_has_fewer_slots() -> None:
    pool = SlotPool(4, uses=2)
    assert (pool.total, pool.free) == (2, 2)


def test_a_poisoned_slot_never_becomes_free() -> None:
    pool = SlotPool(1)
    pool.take()
    pool.poison()
    assert pool.free == 0
    with pytest.raises(AssertionError, match="0 free"):
        pool.take()
    with pytest.raises(AssertionError, match="0 in use"):
        pool.release()
