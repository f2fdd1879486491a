"""A profile as folded stacks: lines of `outer;inner 12`, where 12 is the number of samples, or of bytes. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

OTHERS: Final = "(other stacks)"
PLATFORM: Final = "(gpufn itself)"  # the only frame of memory that no code of the function allocated
_FRAME: Final = re.compile(r"(?P<name>.*) \((?P<file>.*?)(?::(?P<line>\d+))?\)", re.DOTALL)
_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"


class Stack(NamedTuple):
    """`frames` from the outermost one, as `name (file:line)`."""

    frames: tuple[str, ...]
    samples: int


class Top(NamedTuple):
    """A function or a line, with the parts of all samples in which it ran itself, and in which it was on the stack."""

    frame: str
    own: float
    total: float


def parse(text: str) -> list[Stack]:
    r"""Parse folded stacks. Lines of another form are ignored.

    >>> parse("a (x.py:1);b (x.py:2) 3\nnothing\n")
    [Stack(frames=('a (x.py:1)', 'b (x.py:2)'), samples=3)]
    """
    stacks = []
    for line in text.splitlines():
        frames, _, samples = line.rpartition(" ")
        if frames and samples.isascii() and samples.isdecimal():
            stacks.append(Stack(tuple(frames.split(";")), int(samples)))
    return stacks


def shortened(text: str, most_bytes: int) -> str:
    r"""Keep the heaviest stacks, and count the others together.

    >>> shortened("a;b 2\na;c 9\na;d 1\n", 8)
    'a;c 9\n(other stacks) 3\n'
    """
    if len(text.encode()) <= most_bytes:
        return text
    kept: list[str] = []
    left = most_bytes
    others = 0
    for stack in sorted(parse(text), key=lambda each: -each.samples):
        line = f"{';'.join(stack.frames)} {stack.samples}\n"
        left -= len(line.encode())
        if left >= 0:
            kept.append(line)
        else:
            others += stack.samples
    return "".join([*kept, f"{OTHERS} {others}\n"])


def top(stacks: Iterable[Stack], most: int) -> list[Top]:
    """Return the functions that ran longest themselves. The lines of a function count together.

    >>> top(parse("main (m.py:1);f (m.py:5) 3"), 1)
    [Top(frame='f (m.py)', own=1.0, total=1.0)]
    """
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    samples = 0
    for stack in stacks:
        names = [_without_line(frame) for frame in stack.frames]
        samples += stack.samples
        own[names[-1]] += stack.samples
        for name in set(names):
            total[name] += stack.samples
    return [Top(name, count / samples, total[name] / samples) for name, count in own.most_common(most)]


def speedscope(stacks: Iterable[Stack], name: str, *, rate: int | None) -> dict[str, Any]:
    """Return a profile in the file format of speedscope: in seconds, or in bytes without a rate."""
    numbers: dict[str, int] = {}
    samples: list[list[int]] = []
    weights: list[float] = []
    for stack in stacks:
        samples.append([numbers.setdefault(frame, len(numbers)) for frame in stack.frames])
        weights.append(stack.samples / (rate or 1))
    profile = {
        "type": "sampled",
        "name": name,
        "unit": "seconds" if rate else "bytes",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
    return {
        "$schema": _SCHEMA,
        "exporter": "gpufn",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(frame) for frame in numbers]},
        "profiles": [profile],
    }


def _without_line(frame: str) -> str:
    match = _FRAME.fullmatch(frame)
    return frame if match is None else f"{match['name']} ({match['file']})"


def _frame(frame: str) -> dict[str, Any]:
    match = _FRAME.fullmatch(frame)
    if match is None:
        return {"name": frame}
    line = {} if match["line"] is None else {"line": int(match["line"])}
    return {"name": match["name"], "file": match["file"], **line}
