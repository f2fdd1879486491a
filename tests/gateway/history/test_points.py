"""Points of the history: sums, distributions, and the points of revisions."""

from __future__ import annotations

import random

import pytest

from gpufn_gateway.history.durations import MAX_BUCKET, bucket_of, quantile_s
from gpufn_gateway.history.fields import MAX_CODES, Field, Point, Points, add_count, merged, pack, unpack
from gpufn_gateway.history.revisions import collapse, expand


def test_sums_are_added_maxima_compared_and_counts_added_by_key() -> None:
    first: Point = {Field.CALLS: 2, Field.QUEUED_MAX: 5, Field.ERRORS: {"a": 1}}
    second: Point = {Field.CALLS: 3, Field.QUEUED_MAX: 4, Field.ERRORS: {"a": 1, "b": 2}, Field.READY: 1}
    assert merged([first, second]) == {
        Field.CALLS: 5,
        Field.QUEUED_MAX: 5,
        Field.ERRORS: {"a": 2, "b": 2},
        Field.READY: 1,
    }


def test_a_hostile_function_cannot_make_a_point_large_with_its_codes() -> None:
    point: dict[int, object] = {}
    for number in range(10_000):
        add_count(point, Field.ERRORS, f"code-{number}")
    errors = point[Field.ERRORS]
    assert isinstance(errors, dict)
    assert (len(errors), errors["other"]) == (MAX_CODES + 1, 10_000 - MAX_CODES)


@pytest.mark.parametrize("counts", [{}, {0: 1}, {MAX_BUCKET: 1}, {0: 127, 1: 128, MAX_BUCKET: 2**40}, {36: 1, 40: 300}])
def test_a_distribution_survives_its_packing(counts: dict[int, int]) -> None:
    point: Point = {Field.CALLS: 1} | ({Field.LATENCY: counts} if counts else {})
    assert unpack(pack(point)) == point


def test_a_quantile_is_at_most_nine_per_cent_off() -> None:
    source = random.Random(1)
    durations = sorted(source.lognormvariate(-3, 1) for _ in range(10_000))
    counts: dict[int, int] = {}
    for each in durations:
        counts[bucket_of(each)] = counts.get(bucket_of(each), 0) + 1
    for share in (0.5, 0.9, 0.99):
        assert quantile_s(counts, share) == pytest.approx(durations[int(share * 10_000) - 1], rel=0.1)


def test_the_point_of_the_only_revision_is_left_out_and_found_again() -> None:
    calls: Point = {Field.CALLS: 5, Field.LATENCY: {36: 5}}
    one: Points = {"function:f": {**calls, Field.READY: 10}, "function:f@3": calls, "node:a": {Field.WORKERS: 1}}
    collapsed = collapse(one)
    assert (set(collapsed), expand(collapsed)) == ({"function:f", "node:a"}, one)
    two: Points = {**one, "function:f@4": {Field.CALLS: 1}}
    assert expand(collapse(two)) == two
    expanded = expand(collapsed)
    expanded["function:f"][Field.LATENCY][36] += 1
    assert expanded["function:f@3"][Field.LATENCY] == {36: 5}
