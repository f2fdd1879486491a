"""Progress of a map as the output of a notebook's cell. Updates replace the output, and are at most ten per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from gpufn.notebook import html
from gpufn.notebook.cell_output import CellOutput

_PERIOD_S = 0.1


class NotebookBar:
    """A progress bar like `gpufn.maps.progress_bar.Bar`. `display` is IPython's function."""

    is_drawn = True

    def __init__(
        self,
        name: str,
        total: int | None,
        *,
        display: Callable[..., Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._total = total
        self._output = CellOutput(display)
        self._clock = clock
        self._done = 0
        self._note = ""
        self._next_at = 0.0

    def advance(self) -> None:
        """Count one more result."""
        self._done += 1
        if self._clock() >= self._next_at:
            self._draw()

    def wait(self, text: str) -> None:
        """Show why items are not being sent. An empty text means that they are sent again."""
        self._note = text
        self._draw()

    def _draw(self) -> None:
        state = self._name, self._done, self._total, self._note
        self._output.show(html.progress(*state), html.plain_progress(*state))
        self._next_at = self._clock() + _PERIOD_S

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._note = "" if error is None else type(error).__name__
        self._draw()
