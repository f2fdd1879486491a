"""What Docker says as it builds an image: the lines for the function's log, and why a step failed. Pure."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpufn_core.errors import BuildFailed

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NOTES = ("--->", "Removing intermediate container")
_STEP = re.compile(r"Step \d+/\d+ : (.*)")
_A_COMMAND_FAILED = re.compile(r"returned a non-zero code: \d+\.?$")
_SAYS_WHERE_TO_READ = "ERROR: ResolutionImpossible"  # pip's last word, after it has said which packages do not agree
# It travels in a worker event, and all that failed compilers print is megabytes.
_KEPT_LINES = 200
_LONGEST_LINE = 4 << 10  # characters


class BuildOutput:
    """Of one build. A step's end is kept until the next one begins."""

    def __init__(self) -> None:
        self._step = ""
        self._kept: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    def lines(self, part: Mapping[str, Any]) -> list[str]:
        """What to show of a `part` of the answer: how far a layer has come is told many times a second, and is not."""
        if part.get("progressDetail"):
            return []
        lines = [line[:_LONGEST_LINE] for line in lines_of(str(part.get("stream", part.get("status", ""))))]
        for line in lines:
            if (begun := _STEP.fullmatch(line)) is not None:
                self._step = begun[1]
                self._kept.clear()
            else:
                self._kept.append(line)
        return lines

    def failure(self, error: str) -> BuildFailed:
        """`error` is the builder's own: of a command that failed it says only which, and nothing else says what
        kept the builder from a layer."""
        why = failing_line(self._kept) if self._kept and _A_COMMAND_FAILED.search(error) else error
        return BuildFailed(
            f"the image does not build: {why} (in: {self._step})", stage="image", log="\n".join(self._kept)
        )


def failing_line(output: Iterable[str]) -> str:
    """What to show of a command that failed: the last line that a package manager calls an error, else the last."""
    lines = list(output)
    said = [
        line for line in lines if line.lower().startswith(("error", "e: ")) and not line.startswith(_SAYS_WHERE_TO_READ)
    ]
    return (said or lines or ["it said nothing"])[-1]


def lines_of(text: str) -> list[str]:
    """What a build prints, without colours and without the builder's notes about its own containers.

    >>> lines_of("\\x1b[91mERROR: no such package\\n\\x1b[0mRemoving intermediate container 7c2\\n ---> 1f\\n")
    ['ERROR: no such package']
    """
    lines = (_COLOUR.sub("", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(_NOTES)]
