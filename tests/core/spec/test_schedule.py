"""Tables of due times of schedules, including changes of the clock."""

from __future__ import annotations

import datetime
import itertools
import sys
import zoneinfo
from typing import Any

import pytest

from gpufn import gpu_function
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.schedule import Missed, Schedule, due, next_time

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


def test_a_worker_with_packages_of_its_own_reads_a_schedule_without_cronsim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cronsim", None)
    assert Schedule("0 3 * * *", timezone="Europe/Berlin").cron == "0 3 * * *"


def at(text: str, zone: datetime.tzinfo = datetime.UTC) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def shown(times: list[float], zone: datetime.tzinfo = BERLIN) -> list[str]:
    return [datetime.datetime.fromtimestamp(time, zone).strftime("%m-%d %H:%M%z") for time in times]


def following(schedule: Schedule, after: float, count: int) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        after = next_time(schedule, after) or 0.0
        times.append(after)
    return times


@pytest.mark.parametrize(
    ("cron", "zone", "times"),
    [
        ("*/5 * * * *", "UTC", ["03-01 12:05", "03-01 12:10"]),
        ("0 9 * * MON-FRI", "UTC", ["03-02 09:00", "03-03 09:00"]),
        ("30 1 1 * *", "UTC", ["04-01 01:30", "05-01 01:30"]),
        ("0 0 29 2 *", "UTC", ["02-29 00:00", "02-29 00:00"]),
        ("0 8 * * *", "Asia/Kolkata", ["03-02 02:30", "03-03 02:30"]),
    ],
)
def test_the_next_times_of_a_line(cron: str, zone: str, times: list[str]) -> None:
    found = following(Schedule(cron, zone), at("2026-03-01T12:00:00"), 2)
    assert [text.removesuffix("+0000") for text in shown(found, datetime.UTC)] == times


def test_a_line_runs_once_where_the_clock_is_set_forward() -> None:
    """At 2:00 on 29 March 2026 it is 3:00 in Berlin."""
    found = following(Schedule("30 2 * * *", "Europe/Berlin"), at("2026-03-28T00:00:00", BERLIN), 3)
    assert shown(found) == ["03-28 02:30+0100", "03-29 03:00+0200", "03-30 02:30+0200"]


def test_a_line_with_a_fixed_hour_runs_once_where_the_clock_is_set_back() -> None:
    """At 3:00 on 25 October 2026 it is 2:00 in Berlin."""
    found = following(Schedule("30 2 * * *", "Europe/Berlin"), at("2026-10-24T12:00:00", BERLIN), 2)
    assert shown(found) == ["10-25 02:30+0200", "10-26 02:30+0100"]


def test_a_half_hourly_line_follows_the_clock_where_it_is_set_back() -> None:
    found = following(Schedule("*/30 * * * *", "Europe/Berlin"), at("2026-10-25T01:59:00", BERLIN), 5)
    assert shown(found) == [
        "10-25 02:00+0200",
        "10-25 02:30+0200",
        "10-25 02:00+0100",
        "10-25 02:30+0100",
        "10-25 03:00+0100",
    ]
    assert [after - before for before, after in itertools.pairwise(found)] == [1800.0] * 4


# An hour later it is 2 o'clock in Berlin again, and the run of 2:30 has already happened.
AGAIN = at("2026-10-25T00:00:00") + 3600


@pytest.mark.parametrize(
    ("cron", "minutes", "following_one"),
    [
        ("30 2 * * *", 10, "10-26 02:30+0100"),
        ("15 0,1,2,3 * * *", 10, "10-25 03:15+0100"),
        ("*/30 * * * *", 10, "10-25 02:30+0100"),
        ("30 2 * * *", -60, "10-25 02:30+0200"),
    ],
)
def test_the_next_time_is_never_one_that_has_passed_though_the_clock_shows_its_hour_again(
    cron: str, minutes: int, following_one: str
) -> None:
    assert shown(following(Schedule(cron, "Europe/Berlin"), AGAIN + minutes * 60, 1)) == [following_one]


@pytest.mark.parametrize(
    ("cron", "since", "now", "times"),
    [
        # no leader from 2:20 to 2:10, half an hour before to ten minutes after the clock was set back
        ("30 2 * * *", -40, 10, ["10-25 02:30+0200"]),
        ("15,45 2 * * *", -40, 10, ["10-25 02:45+0200"]),
        ("15,45 2 * * *", -60, 10, ["10-25 02:15+0200", "10-25 02:45+0200"]),
        ("*/30 * * * *", -40, 10, ["10-25 02:30+0200", "10-25 02:00+0100"]),
        ("30 2 * * *", -10, 50, []),
    ],
)
def test_runs_missed_before_the_clock_was_set_back_happen_after_it(
    cron: str, since: int, now: int, times: list[str]
) -> None:
    schedule = Schedule(cron, "Europe/Berlin", missed=Missed.ALL)
    assert shown(due(schedule, AGAIN + since * 60, AGAIN + now * 60)) == times


NOON = at("2026-03-01T12:00:00")


@pytest.mark.parametrize(
    ("missed", "since", "now", "times"),
    [
        # not due yet; due on the second; slightly late
        ("once", NOON, NOON + 59, []),
        ("once", NOON, NOON + 60, [60]),
        ("skip", NOON, NOON + 60, [60]),
        ("all", NOON, NOON + 60.2, [60]),
        # finished runs are not repeated
        ("all", NOON + 60, NOON + 60.2, []),
        ("all", NOON + 60, NOON + 120, [120]),
        # ten minutes without a leader, and 30 s
        ("once", NOON, NOON + 630, [600]),
        ("skip", NOON, NOON + 630, [600]),
        ("skip", NOON, NOON + 600 + 59, [600]),
        ("all", NOON, NOON + 630, [60 * minute for minute in range(1, 11)]),
        # a year: limited to the newest
        ("all", NOON - 365 * 86_400, NOON + 30, [-60 * minute for minute in range(99, -1, -1)]),
        # the clock was set back
        ("all", NOON + 600, NOON, []),
    ],
)
def test_due_runs(missed: str, since: float, now: float, times: list[float]) -> None:
    found = due(Schedule("* * * * *", missed=Missed(missed)), since, now)
    assert [time - NOON for time in found] == times


def test_a_missed_run_is_skipped_when_it_is_more_than_a_minute_late() -> None:
    hourly = Schedule("0 * * * *", missed=Missed.SKIP)
    assert due(hourly, NOON - 1800, NOON + 60) == [NOON]
    assert due(hourly, NOON - 1800, NOON + 61) == []


def test_a_one_time_schedule_is_due_once() -> None:
    once = Schedule(at=NOON)
    assert (next_time(once, NOON - 1), next_time(once, NOON)) == (NOON, None)
    assert (due(once, NOON - 10, NOON - 1), due(once, NOON - 10, NOON + 999)) == ([], [NOON])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cron": "0 0 30 2 *"}, "'0 0 30 2 *' never fires"),
        ({"cron": "0 0 31 4,6 *"}, "never fires"),
        ({"cron": "60 * * * *"}, "is not a valid cron line: bad minute"),
        ({"cron": "often"}, "has five fields"),
        ({"cron": "* * * * * *"}, "has five fields"),
        ({"cron": "* * * * *", "timezone": "Mars/Olympus"}, "unknown time zone 'Mars/Olympus'"),
        ({"cron": "* * * * *", "timezone": "../../etc/passwd"}, "unknown time zone"),
        ({"cron": "* * * * *", "missed": "some"}, "missed is 'skip', 'once' or 'all'"),
        ({"cron": "* * * * *", "arguments": [1]}, "arguments are named"),
        ({"cron": "* * * * *", "arguments": {"x": [1 << 64]}}, "a number in its arguments has more than 64 bits"),
        ({"cron": "* * * * " + "x" * 99 + " *"}, "not '* * * * " + "x" * 32 + "'"),
        ({"cron": "* * * * *", "priority": "urgent"}, "priority is 'hi', 'normal' or 'low', not 'urgent'"),
        ({}, "give a cron line"),
        ({"cron": "* * * * *", "at": 5.0}, "give a cron line"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match="schedule: ") as raised:
        Schedule(**fields)
    assert message in raised.value.message


def test_a_function_declares_its_schedule_with_its_arguments() -> None:
    def report(day: str, full: bool = False) -> None: ...

    spec = gpu_function(schedule=Schedule("0 6 * * *", arguments={"day": "today"}))(report).spec()
    assert spec.schedule == Schedule("0 6 * * *", arguments={"day": "today"})
    with pytest.raises(InvalidSpec, match=r"lacks day;"):
        gpu_function(schedule="0 6 * * *")(report).spec()
    with pytest.raises(InvalidSpec, match="calls 'other'"):
        gpu_function(schedule=Schedule("0 6 * * *", method="other"))(report).spec()
    with pytest.raises(InvalidSpec, match="never fires"):
        gpu_function(schedule="0 0 30 2 *")(report)
    with pytest.raises(InvalidSpec, match="cron line"):
        gpu_function(schedule=Schedule(at=5.0, arguments={"day": "today"}))(report).spec()


def test_without_time_zone_data_utc_works_and_others_fail_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def knows_none(name: str) -> datetime.tzinfo:
        raise zoneinfo.ZoneInfoNotFoundError(name)

    monkeypatch.setattr(zoneinfo, "ZoneInfo", knows_none)
    monkeypatch.setattr(zoneinfo, "available_timezones", set)
    assert next_time(Schedule("0 6 * * *"), NOON) == NOON + 18 * 3600
    with pytest.raises(InvalidSpec, match=r"Europe/Berlin.*UTC.*tzdata"):
        Schedule("0 6 * * *", timezone="Europe/Berlin")
