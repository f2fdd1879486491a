"""Tables of predictions from the history of arrivals."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from gpufn_gateway.controller.decide.scaling.prewarm import (
    EARLY_S,
    SLOT_S,
    SLOTS,
    ArrivalHistory,
    expected_call,
    forecast,
    slot_of,
)

MINUTE, HOUR, DAY, WEEK = 60.0, 3600.0, 86_400.0, 7 * 86_400.0
MONDAY = 1_767_571_200.0  # 2026-01-05 00:00 UTC


def history(calls: Iterable[float], until: float, since: float = MONDAY) -> ArrivalHistory:
    """Return the history of a controller that watched from `since` until `until`."""
    made = ArrivalHistory()
    for slot in range(slot_of(since), slot_of(until) + 1):
        made = made.record(slot, is_call=False)
    for at in calls:
        made = made.record(slot_of(at), is_call=True)
    return made


def expected(made: ArrivalHistory, at: float, lead_s: float = 0.0) -> str:
    return expected_call(forecast(made, slot_of(at)), made, at, lead_s)


def hourly(hours: Iterable[int]) -> list[float]:
    return [MONDAY + hour * HOUR for hour in hours]


OFFICE = [hour for day in range(5) for hour in range(24 * day + 9, 24 * day + 18)]
OFFICE_WEEKS = [hour + 7 * 24 * week for week in range(3) for hour in OFFICE]


@pytest.mark.parametrize(
    ("calls", "at", "text"),
    [
        ([], 5 * HOUR, ""),
        (hourly(range(3)), 3 * HOUR, ""),  # two periods predict, and one of two predictions is known to be right
        (hourly(range(4)), 4 * HOUR, "a call is expected at 04:00 UTC, as in the last hours"),
        (hourly(range(4)), 4 * HOUR + 20 * MINUTE, ""),
        (hourly(range(4)), 4 * HOUR - EARLY_S, "a call is expected at 04:00 UTC, as in the last hours"),
        (hourly([0, 1, 2, 3, 4, 5]), 8 * HOUR, ""),  # the traffic has ended: 6:00 and 7:00 had no call
        (hourly([9, 33, 57, 81]), 4 * DAY + 9 * HOUR, "a call is expected at 09:00 UTC, as on the last days"),
        (hourly([9, 33, 57, 81]), 4 * DAY + 10 * HOUR, ""),
        (hourly([9, 9 + 168, 9 + 336, 9 + 504]), 4 * WEEK + 9 * HOUR,
         "a call is expected at 09:00 UTC, as in the last weeks"),
        (hourly([9, 9 + 168, 9 + 336, 9 + 504]), 4 * WEEK + DAY + 9 * HOUR, ""),
        (hourly(OFFICE_WEEKS), 3 * WEEK + 9 * HOUR, "a call is expected at 09:00 UTC, as in the last weeks"),
        (hourly(OFFICE_WEEKS), 3 * WEEK + 18 * HOUR, ""),
        (hourly(OFFICE_WEEKS), 3 * WEEK - DAY + 9 * HOUR, ""),  # Sunday
    ],
)  # fmt: skip
def test_periods_are_learned_and_other_traffic_is_not(calls: list[float], at: float, text: str) -> None:
    at += MONDAY
    assert expected(history([call for call in calls if call < at], at), at) == text


def test_calls_at_changing_times_predict_nothing() -> None:
    calls = [MONDAY + hour * HOUR + hour * 23 % 60 * MINUTE for hour in range(48)]
    made = history(calls, MONDAY + 2 * DAY)
    assert not any(forecast(made, slot_of(MONDAY + 2 * DAY)).texts)


@pytest.mark.parametrize(("lead_s", "is_expected"), [(0.0, False), (7 * MINUTE, False), (8 * MINUTE, True)])
def test_a_worker_starts_a_cold_start_before_the_slot(lead_s: float, is_expected: bool) -> None:
    at = MONDAY + 4 * HOUR - 10 * MINUTE
    assert bool(expected(history(hourly(range(4)), at), at, lead_s)) is is_expected


def test_a_lead_of_many_hours_counts_as_an_hour() -> None:
    at = MONDAY + 4 * HOUR - 40 * MINUTE
    assert expected(history(hourly(range(4)), at), at, 9 * HOUR)


def test_a_call_ends_the_expectation_except_in_a_row_of_predicted_slots() -> None:
    single = history(hourly(range(5)), MONDAY + 4 * HOUR)
    assert expected(single, MONDAY + 4 * HOUR + 5) == ""
    pairs = [at + late for at in hourly(range(5)) for late in (0, SLOT_S)]
    row = history(pairs, MONDAY + 4 * HOUR + SLOT_S)
    assert expected(row, MONDAY + 4 * HOUR + 5)
    assert expected(row, MONDAY + 4 * HOUR + SLOT_S + 5) == ""


def test_unobserved_time_does_not_count_against_a_period() -> None:
    at = MONDAY + 7 * HOUR
    calls = hourly([0, 1, 2, 3, 6])
    assert expected(history(calls, MONDAY + 6 * HOUR), at) == ""  # 4:00 and 5:00 were observed, without a call
    gap = history(hourly([0, 1, 2, 3]), MONDAY + 3 * HOUR).record(slot_of(MONDAY + 5 * HOUR), is_call=True)
    assert expected(gap.record(slot_of(MONDAY + 6 * HOUR), is_call=True), at)


def test_the_history_is_bounded_and_survives_storage() -> None:
    made = history(hourly(range(24 * 7 * 6)), MONDAY + 6 * WEEK)
    stored = made.encode()
    assert len(stored) < 900
    assert ArrivalHistory.decode(stored) == made
    assert made.called.bit_length() <= SLOTS


def test_two_histories_merge() -> None:
    one, two = history(hourly([0]), MONDAY + HOUR), history(hourly([2]), MONDAY + 2 * HOUR, MONDAY + HOUR)
    assert one.merge(two) == two.merge(one) == history(hourly([0, 2]), MONDAY + 2 * HOUR)


@pytest.mark.parametrize("jump", [-6 * WEEK, 6 * WEEK, 10_000 * WEEK])
def test_a_clock_that_jumps_starts_a_new_history(jump: float) -> None:
    made = history(hourly(range(5)), MONDAY + 5 * HOUR).record(slot_of(MONDAY + jump), is_call=True)
    assert (made.last, made.called) == (slot_of(MONDAY + jump), 1)


def test_a_clock_that_moves_back_a_little_records_the_earlier_slot() -> None:
    made = history([], MONDAY + HOUR).record(slot_of(MONDAY), is_call=True)
    assert made.has_call(slot_of(MONDAY))
    assert not made.has_call(slot_of(MONDAY + HOUR))


def test_random_calls_are_not_periodic_at_any_rate() -> None:
    """Calls in two of three slots, independent of the time: every prediction would be right two times in three."""
    rng = random.Random(1)
    at = MONDAY + 2 * WEEK
    slots = range(slot_of(MONDAY), slot_of(at))
    made = history([slot * SLOT_S for slot in slots if rng.random() < 2 / 3], at)
    right = sum(any(forecast(made, slot).texts) for slot in range(slot_of(at), slot_of(at) + 4))
    assert right == 0


def test_calls_in_every_slot_are_expected() -> None:
    at = MONDAY + DAY
    assert expected(history([MONDAY + number * SLOT_S for number in range(96)], at - EARLY_S), at)
