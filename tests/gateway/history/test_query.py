"""Queries of the history: their bounds, and gaps, idle times and revisions in an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from gpufn_core.errors import InvalidInput
from gpufn_gateway.history import query
from gpufn_gateway.history.collector import OVERVIEW
from gpufn_gateway.history.fields import Field, Point, Points

_NOW = 1_795_000_000.0
_DAY = 86_400.0


@pytest.mark.parametrize(
    ("age_s", "length_s", "step", "told"),
    [
        (3600, 3600, None, (30, 10)),
        (600, 600, None, (10, 10)),
        (6 * 3600, 6 * 3600, None, (300, 60)),
        (_DAY, 3600, None, (60, 60)),
        (7 * _DAY, 7 * _DAY, None, (3600, 3600)),
        (30 * _DAY, 30 * _DAY, None, (10_800, 3600)),
        (3600, 3600, 60, (60, 60)),
        (3600, 3600, 90, (90, 10)),
        (365 * _DAY, 365 * _DAY, None, "from"),
        (365 * _DAY, 60, 3600, "from"),
        (3 * 3600, 3 * 3600, 10, "step"),
        (5 * _DAY, 5 * _DAY, 60, "step"),
        (3600, 3600, 15, "step"),
        (3600, 3600, 5, "step"),
        (3600, 3600, 10.5, "step"),
        (-60, 60, None, "from"),
        (60, -60, None, "from"),
    ],
)
def test_a_fitting_step_is_chosen_and_an_unkept_step_is_refused(
    age_s: float, length_s: float, step: float | None, told: tuple[int, int] | str
) -> None:
    start = _NOW - age_s
    if isinstance(told, str):
        with pytest.raises(InvalidInput) as refused:
            query.span_of(start, start + length_s, step, _NOW)
        assert refused.value.field == told
    else:
        span = query.span_of(start, start + length_s, step, _NOW)
        assert (span.step_s, span.resolution) == told
        assert (span.start <= start, span.end >= start + length_s, span.start % span.step_s) == (True, True, 0)


@pytest.mark.parametrize(
    ("subjects", "series", "field"),
    [
        ([], [], "subject"),
        ([OVERVIEW] * 21, [], "subject"),
        (["functions"], [], "subject"),
        (["function:"], [], "subject"),
        (["overview:x"], [], "subject"),
        (["function:f@x"], [], "subject"),
        (["function:f@1@2"], [], "subject"),
        (["node:a b"], [], "subject"),
        (["function:\n"], [], "subject"),
        (["gpu:x"], ["calls"], "series"),
        ([OVERVIEW], ["'; DROP TABLE points"], "series"),
        ([f"node:{number}" for number in range(20)], ["power", "energy", "workers", "memory", "gpus"] * 3, "step"),
    ],
)
def test_unanswerable_queries_are_refused(subjects: list[str], series: list[str], field: str) -> None:
    span = query.span_of(_NOW - _DAY, _NOW, 60, _NOW)
    with pytest.raises(InvalidInput) as refused:
        query.check(subjects, series, span)
    assert refused.value.field == field


def test_a_gap_has_no_values_an_idle_function_has_zero_and_an_absent_gpu_has_none() -> None:
    start = int(_NOW) // 10
    stored: dict[int, Points] = {
        start: {OVERVIEW: {Field.SECONDS: 10}, "function:f": {Field.CALLS: 4, Field.READY: 20, Field.LATENCY: {36: 4}}},
        start + 1: {OVERVIEW: {Field.SECONDS: 5}, "gpu:x": {Field.SECONDS: 5, Field.MEASURED: 5, Field.POWER_W: 350}},
    }
    span = query.Span(start * 10, start * 10 + 30, 10, 10)
    answer = query.answer(["function:f", "gpu:x"], [], span, _reader(stored))
    values = {each.subject: {series.name: series.values for series in each.series} for each in answer.results}
    assert values["function:f"]["calls"] == [4, 0, None]
    assert values["function:f"]["workers"] == [2.0, 0.0, None]
    assert values["function:f"]["p99"] == [0.047, None, None]
    assert values["gpu:x"]["power"] == [None, 70.0, None]


def test_a_revision_is_found_in_the_point_of_its_function_and_only_there_if_it_was_the_only_one() -> None:
    start = int(_NOW) // 10
    overview: Point = {Field.SECONDS: 10}
    stored: dict[int, Points] = {
        start: {OVERVIEW: overview, "function:f": {Field.CALLS: 5, Field.REVISION: 1}},
        start + 1: {OVERVIEW: overview, "function:f": {Field.CALLS: 3}, "function:f@2": {Field.CALLS: 2}},
        start + 2: {OVERVIEW: overview, "function:f": {Field.CALLS: 9, Field.REVISION: 2}},
    }
    for step, expected in ((10, [0, 2, 9]), (30, [11])):
        span = query.Span(start * 10, start * 10 + 30, step, 10)
        (result,) = query.answer(["function:f@2"], ["calls"], span, _reader(stored)).results
        assert result.series[0].values == expected


def _reader(stored: Mapping[int, Points]) -> query.Read:
    def read(resolution: int, first: int, last: int, names: Sequence[str]) -> Mapping[int, Points]:
        return {
            slot: {name: point for name, point in points.items() if name in names}
            for slot, points in stored.items()
            if first <= slot <= last
        }

    return read
