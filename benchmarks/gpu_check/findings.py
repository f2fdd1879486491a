"""What a step says, and what became of it: plain data, written as JSON and read by the reports."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class Table(msgspec.Struct, frozen=True):
    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""


class Plot(msgspec.Struct, frozen=True):
    """Bars side by side: a group per label, in it a bar per series. None is a gap: it was not measured."""

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`wrong` lists what was measured and should not be so: with any of it the step has failed. `said` is what programs
    answered, word by word, by what was asked."""

    summary: str  # one line
    figures: dict[str, Any] = {}
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    said: Mapping[str, str] = {}
    wrong: Sequence[str] = ()


class State(enum.StrEnum):
    PASSED = "passed"
    SKIPPED = "skipped"  # this machine cannot do it
    FAILED = "failed"
    TIMED_OUT = "timed out"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a step. `detail` is its traceback, with the ends of the platform's logs, and what it printed."""

    step: str
    state: State
    seconds: float = 0.0
    reason: str = ""  # one line: why there is no finding, or what is wrong with it
    detail: str = ""
    finding: Finding | None = None
    is_left: bool = False  # the whole check's time was over before it, or within it

    @property
    def line(self) -> str:
        """What the summary says of it."""
        return self.reason or (self.finding.summary if self.finding else "")


class Report(msgspec.Struct, kw_only=True):
    """The whole check. `machine` describes where it ran; `pretended` that a GPU was pretended, so no figure counts."""

    date: str
    device: str
    driver: str
    pretended: bool
    machine: dict[str, Any]
    seconds: float = 0.0
    results: list[Result] = []
