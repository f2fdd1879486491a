"""The reason why a call waits, below the cell that waits for it."""

from __future__ import annotations

import pytest

from gpufn.notebook.waits import waits_shown
from gpufn_core.errors import Forbidden
from gpufn_core.protocol.reports import Waiting, WaitReason
from tests.sdk.notebook.cell import Cell

_LIMIT = Waiting(WaitReason.LIMIT, "max_workers is reached: 1")


def test_the_reason_is_shown_until_the_call_ends() -> None:
    cell = Cell()
    with waits_shown("f", lambda: _LIMIT, display=cell.display, period_s=0.001):
        assert cell.is_shown.wait(30)
    assert cell.shown == ["f waits: max_workers is reached: 1", ""]


def test_of_calls_at_the_same_time_one_shows_its_reason() -> None:
    first, second = Cell(), Cell()
    with waits_shown("f", lambda: _LIMIT, display=first.display, period_s=0.001):
        with waits_shown("g", lambda: _LIMIT, display=second.display, period_s=0.001):
            assert first.is_shown.wait(30)
        assert second.shown == []


def test_a_key_that_may_not_read_shows_nothing_and_changes_nothing() -> None:
    cell = Cell()

    def why() -> Waiting | None:
        raise Forbidden("this needs the scope read")

    with pytest.raises(ZeroDivisionError), waits_shown("f", why, display=cell.display, period_s=0.0):
        raise ZeroDivisionError
    assert cell.shown == []
