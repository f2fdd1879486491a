"""One output of a notebook's cell, whose contents are replaced."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class CellOutput:
    """An output that appears when it is first shown. `display` is IPython's function."""

    def __init__(self, display: Callable[..., Any] | None = None) -> None:
        self._display = display
        self._handle: Any = None

    @property
    def is_shown(self) -> bool:
        return self._handle is not None

    def show(self, html: str, plain: str) -> None:
        output = {"text/html": html, "text/plain": plain}
        if self._handle is not None:
            self._handle.update(output, raw=True)
            return
        if self._display is None:
            self._display = importlib.import_module("IPython.display").display
        self._handle = self._display(output, raw=True, display_id=True)
