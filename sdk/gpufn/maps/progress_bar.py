"""Progress bar that counts the results of a map: in a notebook below the cell, else on standard error.

On standard error it shows nothing if rich is not installed.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from gpufn.notebook.kernel import is_notebook
from gpufn.notebook.progress import NotebookBar


def bar_of(name: str, total: int | None) -> Bar | NotebookBar:
    """Return the bar of a map, for a `with` block. `total` is the number of items, or None if it is unknown."""
    return NotebookBar(name, total) if is_notebook() else Bar(name, total)


class WaitDisplay:
    """Shows why the items of a map are not being sent: on its bar, or without a bar or rich as a line at a terminal."""

    def __init__(self) -> None:
        self.bar: Bar | NotebookBar | None = None

    def __call__(self, text: str) -> None:
        if self.bar is not None and self.bar.is_drawn:
            self.bar.wait(text)
        elif text and sys.stderr.isatty():
            sys.stderr.write(f"gpufn: {text}\n")


class Bar:
    """A progress bar. `total` is the number of items, or None if it is unknown."""

    def __init__(self, name: str, total: int | None) -> None:
        self._name = name
        self._total = total
        self._progress: Any = None
        self._task: Any = None

    @property
    def is_drawn(self) -> bool:
        return self._progress is not None

    def advance(self) -> None:
        """Count one more result."""
        if self._progress is not None:
            self._progress.advance(self._task)

    def wait(self, text: str) -> None:
        """Show why items are not being sent. An empty text means that they are sent again."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"{self._name} ({text})" if text else self._name)

    def __enter__(self) -> Self:
        try:
            from rich.console import Console  # noqa: PLC0415
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415
        except ImportError:
            return self
        description = TextColumn("{task.description}", markup=False)
        columns = (description, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(self._name, total=self._total)
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
