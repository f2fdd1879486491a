"""The log of a function, for the lines of a build before it has a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LogLine = Callable[[str, int, str], None]  # function, revision, text


@dataclass(frozen=True)
class BuildLog:
    """A revision's log. Equal logs are one listener, so a line is logged once."""

    log_line: LogLine
    function: str
    revision: int

    def __call__(self, line: str) -> None:
        self.log_line(self.function, self.revision, line)
