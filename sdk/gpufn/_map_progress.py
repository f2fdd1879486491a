"""A bar on standard error that shows how many results of a map have been taken; without rich, nothing."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class Bar:
    """`total` None: nobody knows."""

    def __init__(self, name: str, total: int | None) -> None:
        self._name = name
        self._total = total
        self._shown: Any = None
        self._task: Any = None

    def advance(self) -> None:
        """One more."""
        if self._shown is not None:
            self._shown.advance(self._task)

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
