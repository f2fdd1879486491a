"""Progress of a map in a notebook's cell. `tests/e2e/test_notebook.py` has a real kernel."""

from __future__ import annotations

import pytest

from gpufn.notebook.progress import NotebookBar
from tests.sdk.notebook.cell import Cell


def _bar(cell: Cell, now: list[float]) -> NotebookBar:
    return NotebookBar("f", 100, display=cell.display, clock=lambda: now[0])


def test_many_results_are_few_updates_and_the_last_one_is_shown() -> None:
    cell, now = Cell(), [5.0]
    with _bar(cell, now) as bar:
        for number in range(100):
            now[0] = 5.0 + number / 1000
            bar.advance()
    assert cell.shown == ["f 0/100", "f 100/100"]


def _advance_and_fail(bar: NotebookBar) -> None:
    bar.advance()
    bar.wait("the queue is full")
    raise ValueError("bad")


def test_a_wait_is_shown_at_once_and_an_error_at_the_end() -> None:
    cell, now = Cell(), [5.0]
    bar = _bar(cell, now)
    with pytest.raises(ValueError, match="bad"), bar:
        _advance_and_fail(bar)
    assert cell.shown == ["f 0/100", "f 1/100 (the queue is full)", "f 1/100 (ValueError)"]
