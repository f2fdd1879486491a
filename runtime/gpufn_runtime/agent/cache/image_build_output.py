"""Docker's output while it builds an image: the lines for the function's log, and the reason of a failure. Pure."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpufn_core.errors import BuildFailed

_COLOR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_BUILDER_NOTES = ("--->", "Removing intermediate container")
_STEP = re.compile(r"Step \d+/\d+ : (.*)")
_COMMAND_FAILED = re.compile(r"returned a non-zero code: \d+\.?$")
_PIP_LINK_LINE = "ERROR: ResolutionImpossible"  # pip prints this with a link, after it has named the conflict
# The log travels in a worker event, and failed compilers print megabytes.
_MAX_LINES = 200
_MAX_LINE_LENGTH = 4 << 10  # characters


class BuildOutput:
    """Output of one build. Keeps the last lines of the current step."""

    def __init__(self) -> None:
        self._step = ""
        self._step_lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)

    def lines(self, part: Mapping[str, Any]) -> list[str]:
        """Return the log lines of one `part` of Docker's response. Skips layer progress, sent many times a second."""
        if part.get("progressDetail"):
            return []
        lines = [line[:_MAX_LINE_LENGTH] for line in lines_of(str(part.get("stream", part.get("status", ""))))]
        for line in lines:
            if (step := _STEP.fullmatch(line)) is not None:
                self._step = step[1]
                self._step_lines.clear()
            else:
                self._step_lines.append(line)
        return lines

    def failure(self, error: str) -> BuildFailed:
        """Return the error to raise. `error` is Docker's message. When a command failed, that message names only the
        command, so the reason is taken from the command's output."""
        reason = failing_line(self._step_lines) if self._step_lines and _COMMAND_FAILED.search(error) else error
        return BuildFailed(
            f"the image does not build: {reason} (in: {self._step})", stage="image", log="\n".join(self._step_lines)
        )


def failing_line(output: Iterable[str]) -> str:
    """Return the last line that a package manager marks as an error, or else the last line."""
    lines = list(output)
    errors = [
        line for line in lines if line.lower().startswith(("error", "e: ")) and not line.startswith(_PIP_LINK_LINE)
    ]
    return (errors or lines or ["no output"])[-1]


def lines_of(text: str) -> list[str]:
    """Split build output into lines, without color codes and Docker's notes about its intermediate containers.

    >>> lines_of("\\x1b[91mERROR: no such package\\n\\x1b[0mRemoving intermediate container 7c2\\n ---> 1f\\n")
    ['ERROR: no such package']
    """
    lines = (_COLOR_CODE.sub("", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(_BUILDER_NOTES)]
