"""Findings and results of steps: plain data, written as JSON and read by the reports."""

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
    """Grouped bars: a group per label, with a bar per series. None is a gap: a value that was not measured."""

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float | None]]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`wrong` lists measurements that are not as they should be; if there are any, the step has failed. `said` has the
    verbatim output of programs, by command."""

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
    """The result of a step. `detail` has its traceback, the ends of the platform's logs, and its output."""

    step: str
    state: State
    seconds: float = 0.0
    reason: str = ""  # one line: why there is no finding, or what is wrong with it
    detail: str = ""
    finding: Finding | None = None
    is_left: bool = False  # the time of the whole check ended before or during this step

    @property
    def line(self) -> str:
        """The step's line in the summary."""
        return self.reason or (self.finding.summary if self.finding else "")


class Report(msgspec.Struct, kw_only=True):
    """The whole check. `machine` describes where it ran. If a GPU was `pretended`, the figures do not count."""

    date: str
    device: str
    driver: str
    pretended: bool
    machine: dict[str, Any]
    seconds: float = 0.0
    results: list[Result] = []
