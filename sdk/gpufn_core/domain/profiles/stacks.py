"""A profile as folded stacks: lines of `outer;inner 12`, where 12 is the number of samples, or of bytes. Pure.

Workers write some of these lines, so any text takes linear time, and numbers are bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

OTHERS: Final = "(other stacks)"
PLATFORM: Final = "(gpufn itself)"  # the only frame of memory that no code of the function allocated
_MAX_DIGITS: Final = 15
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
        if frames and (count := _number(samples)) is not None:
            stacks.append(Stack(tuple(frames.split(";")), count))
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
    samples = samples or 1  # a worker may write stacks without samples
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
    name, file, _ = _parts(frame)
    return name if file is None else f"{name} ({file})"


def _frame(frame: str) -> dict[str, Any]:
    name, file, line = _parts(frame)
    if file is None:
        return {"name": name}
    return {"name": name, "file": file, **({} if line is None else {"line": line})}


def _parts(frame: str) -> tuple[str, str | None, int | None]:
    """Return the name, the file and the line of a frame. None: it has none.

    >>> _parts("f (x.py:12)"), _parts("f (x.py)"), _parts("operator() (a b)"), _parts("f")
    (('f', 'x.py', 12), ('f', 'x.py', None), ('operator()', 'a b', None), ('f', None, None))
    """
    name, mark, place = frame.removesuffix(")").rpartition(" (")
    if not mark or not frame.endswith(")"):
        return frame, None, None
    file, colon, line = place.rpartition(":")
    if colon and (number := _number(line)) is not None:
        return name, file, number
    return name, place, None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None
