"""Queries of the history: their bounds, and the answer from the stored points. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_gateway.history.blocks import HOUR, MINUTE, RESOLUTIONS, SECONDS_10
from gpufn_gateway.history.collector import OVERVIEW
from gpufn_gateway.history.fields import Field, Point, Points, merge
from gpufn_gateway.history.revisions import expand
from gpufn_gateway.history.series import DEFAULTS, SERIES, Value
from gpufn_gateway.openapi.request_bounds import HISTORY_SUBJECT

KEPT_S: Final[Mapping[int, float]] = {SECONDS_10: 2 * 3600.0, MINUTE: 2 * 86_400.0, HOUR: 30 * 86_400.0}
MAX_SUBJECTS: Final = 20
MAX_STEPS: Final = 1_500
MAX_VALUES: Final = 50_000
MAX_POINTS: Final = 50_000  # stored points that a query may read
_GOOD_STEPS_S: Final = (10, 30, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 86_400)
_GOOD_COUNT: Final = 300
_SLACK_S: Final = 900.0  # beyond the stored range: a client's clock differs, and so do its last and our first step

Read = Callable[[int, int, int, Sequence[str]], Mapping[int, Points]]  # resolution, first and last slot, subjects


class Span(msgspec.Struct, frozen=True):
    """Steps of `step_s` seconds from `start` on, read from points of `resolution` seconds."""

    start: int
    end: int
    step_s: int
    resolution: int

    @property
    def steps(self) -> int:
        return (self.end - self.start) // self.step_s


class Named(msgspec.Struct, frozen=True):
    name: str
    unit: str
    values: list[Value]


class Result(msgspec.Struct, frozen=True):
    subject: str
    series: list[Named]


class Answer(msgspec.Struct, frozen=True):
    """`at` has the start of each step, in unix seconds. A value of a step in which nothing was recorded is None."""

    start: int = msgspec.field(name="from")
    to: int
    step: int
    resolution: int
    at: list[int]
    results: list[Result]


def span_of(start: float | None, end: float | None, step_s: float | None, now: float) -> Span:
    """Return the span of a query. Raises InvalidInput with the bound that it exceeds."""
    end = now if end is None else min(end, now)
    start = end - 3600.0 if start is None else start
    if start >= end:
        raise InvalidInput("`from` must be before `to` and before now", field="from")
    age_s = now - start
    if age_s > KEPT_S[HOUR] + HOUR + _SLACK_S:
        raise InvalidInput(f"the history goes back {KEPT_S[HOUR] / 86_400:g} days: choose a later `from`", field="from")
    kept = [resolution for resolution in RESOLUTIONS if age_s <= KEPT_S[resolution] + _SLACK_S] or [HOUR]
    if step_s is None:
        fitting = (each for each in _GOOD_STEPS_S if each >= kept[0] and (end - start) / each <= _GOOD_COUNT)
        step_s = next(fitting, _GOOD_STEPS_S[-1])
    step = int(step_s)
    if step != step_s or step < SECONDS_10 or step % SECONDS_10:
        raise InvalidInput("`step` is a multiple of 10 seconds", field="step")
    resolution = max(each for each in RESOLUTIONS if step % each == 0)
    if resolution < kept[0]:
        raise InvalidInput(
            f"a step of {step} s needs points of {resolution} s, which are kept for {_words(KEPT_S[resolution])}: use "
            f"a multiple of {kept[0]} s, or a later `from`",
            field="step",
        )
    first = int(start // step) * step
    last = -int(-end // step) * step
    if (last - first) // step > MAX_STEPS:
        raise InvalidInput(
            f"this is {(last - first) // step:,} steps, and an answer has at most {MAX_STEPS:,}: use a larger `step`",
            field="step",
        )
    return Span(first, last, step, resolution)


def _words(seconds: float) -> str:
    return f"{seconds / 86_400:g} days" if seconds > 86_400 else f"{seconds / 3600:g} hours"


def kind_of(subject: str) -> str:
    """Return the kind of a subject: function, node, gpu or overview. Raises InvalidInput."""
    if HISTORY_SUBJECT.fullmatch(subject) is None:
        raise InvalidInput(
            f"{subject[:80]!r} is not a subject: use overview, function:NAME, function:NAME@REVISION, node:NAME or "
            "gpu:UUID",
            field="subject",
        )
    return subject.partition(":")[0]


def check(subjects: Sequence[str], series: Sequence[str], span: Span) -> None:
    """Raise InvalidInput for a series that a subject does not have, and for an answer that would be too large."""
    if not subjects:
        raise InvalidInput("`subject` is missing: use overview, function:NAME, node:NAME or gpu:UUID", field="subject")
    if len(subjects) > MAX_SUBJECTS:
        raise InvalidInput(f"a query has at most {MAX_SUBJECTS} subjects, not {len(subjects)}", field="subject")
    for kind in dict.fromkeys(map(kind_of, subjects)):
        for name in series:
            if name not in SERIES[kind]:
                known = ", ".join(sorted(SERIES[kind]))
                raise InvalidInput(f"{kind} has no series {name[:40]!r}; it has {known}", field="series")
    values = len(subjects) * max(1, len(set(series))) * span.steps
    if values > MAX_VALUES:
        raise InvalidInput(
            f"an answer has at most {MAX_VALUES:,} values, not {values:,}: use a larger `step`", field="step"
        )
    points = len(subjects) * (span.end - span.start) // span.resolution
    if points > MAX_POINTS:
        raise InvalidInput(
            f"this reads {points:,} points, and a query reads at most {MAX_POINTS:,}: use fewer subjects, or a `step` "
            "that is a multiple of 3600",
            field="step",
        )


def answer(subjects: Sequence[str], series: Sequence[str], span: Span, read: Read) -> Answer:
    """Answer a checked query."""
    slots_per_step = span.step_s // span.resolution
    first = span.start // span.resolution
    functions = [subject.partition("@")[0] for subject in subjects]  # may have the points of their only revision
    stored = read(span.resolution, first, span.end // span.resolution - 1, [*subjects, *functions, OVERVIEW])
    totals: dict[str, list[Point]] = {name: [{} for _ in range(span.steps)] for name in {*subjects, OVERVIEW}}
    for slot, points in stored.items():
        step = (slot - first) // slots_per_step
        for subject, point in expand(points).items():
            if subject in totals:
                merge(totals[subject][step], point)
    recorded = [point.get(Field.SECONDS, 0) for point in totals[OVERVIEW]]
    results = []
    for subject in subjects:
        kind = kind_of(subject)
        points_of = totals[subject]
        # A function without a point was idle. A node or a GPU without one was not there.
        seconds = recorded if kind == "function" else [point.get(Field.SECONDS, 0) for point in points_of]
        results.append(Result(subject, [_named(kind, name, points_of, seconds) for name in series or DEFAULTS[kind]]))
    at = [span.start + span.step_s * step for step in range(span.steps)]
    return Answer(span.start, span.end, span.step_s, span.resolution, at, results)


def _named(kind: str, name: str, points: Sequence[Mapping[int, Any]], seconds: Sequence[int]) -> Named:
    series = SERIES[kind][name]
    values = [series.compute(point, each) if each else None for point, each in zip(points, seconds, strict=True)]
    return Named(name, series.unit, values)
