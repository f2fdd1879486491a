"""A bar on standard error that shows how many results of a map have been taken; without rich, nothing."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self


class Waits:
    """Shows why items of a map are not sent for now: on the bar, or without a bar or rich as a line at a terminal."""

    def __init__(self) -> None:
        self.bar: Bar | None = None

    def __call__(self, text: str) -> None:
        if self.bar is not None and self.bar.is_drawn:
            self.bar.wait(text)
        elif text and sys.stderr.isatty():
            sys.stderr.write(f"gpufn: {text}\n")


class Bar:
    """`total` None: nobody knows."""

    def __init__(self, name: str, total: int | None) -> None:
        self._name = name
        self._total = total
        self._shown: Any = None
        self._task: Any = None

    @property
    def is_drawn(self) -> bool:
        return self._shown is not None

    def advance(self) -> None:
        """One more."""
        if self._shown is not None:
            self._shown.advance(self._task)

    def wait(self, text: str) -> None:
        """Why items are not sent for now; empty when they are again."""
        if self._shown is not None:
            self._shown.update(self._task, description=f"{self._name} ({text})" if text else self._name)

    def __enter__(self) -> Self:
        try:
            from rich.console import Console  # noqa: PLC0415
            from rich.progress import (  # noqa: PLC0415
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )
        except ImportError:
            return self
        named = TextColumn("{task.description}", markup=False)
        columns = (named, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._shown = Progress(*columns, console=Console(stderr=True))
        self._task = self._shown.add_task(self._name, total=self._total)
        self._shown.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._shown is not None:
            self._shown.stop()
