"""Maps that the platform does not keep: each item is a call of its own."""

from __future__ import annotations

import threading

import pytest

from gpufn.call.cancellable_wait import wake_on_cancel
from gpufn.maps.local_map import results


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
