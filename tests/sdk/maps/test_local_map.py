"""Maps that the platform does not keep: each item is a call of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpufn.call.cancellable_wait import wake_on_cancel
from gpufn.maps.local_map import AT_A_TIME, results, results_async


def test_an_interrupted_map_cancels_its_calls_so_that_the_program_can_end() -> None:
    woken, waits, is_left = threading.Event(), threading.Event(), threading.Event()

    def call(number: int) -> int:
        if number:
            with wake_on_cancel(woken.set):
                waits.set()
                if woken.wait(30):
                    is_left.set()
        else:
            waits.wait(30)
        return number

    items = results(call, [(0,), (1,)], name="f", window=2, ordered=True, return_exceptions=False)
    assert next(items) == 0
    with pytest.raises(KeyboardInterrupt):
        items.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert is_left.wait(30)


def test_a_slow_item_does_not_hold_back_the_calls_of_the_next_hundred() -> None:
    last_has_run = threading.Event()

    def call(number: int) -> int:
        if number == 0:
            assert last_has_run.wait(30)
        if number == 99:
            last_has_run.set()
        return number

    arguments = [(number,) for number in range(100)]
    items = results(call, arguments, name="f", window=None, ordered=True, return_exceptions=False)
    assert list(items) == list(range(100))


def test_a_slow_item_does_not_hold_back_the_tasks_of_the_next_hundred() -> None:
    running: set[int] = set()
    most = 0

    async def scenario() -> list[int | BaseException]:
        last_has_run = asyncio.Event()

        async def call(number: int) -> int:
            nonlocal most
            running.add(number)
            most = max(most, len(running))
            await (asyncio.wait_for(last_has_run.wait(), 30) if number == 0 else asyncio.sleep(0))
            if number == 99:
                last_has_run.set()
            running.remove(number)
            return number

        arguments = [(number,) for number in range(100)]
        items = results_async(call, arguments, window=None, ordered=True, return_exceptions=False)
        return [item async for item in items]

    assert asyncio.run(scenario()) == list(range(100))
    assert most == AT_A_TIME
