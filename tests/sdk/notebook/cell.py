from __future__ import annotations

import threading


class Cell:
    """The outputs that a cell has shown, one after the other."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.is_shown = threading.Event()

    def display(self, output: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        assert raw
        assert display_id
        self.shown.append(output["text/plain"])
        self.is_shown.set()
        return self

    def update(self, output: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(output["text/plain"])
