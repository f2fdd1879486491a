from __future__ import annotations

from gpufn_core.protocol.records import ScheduleRecord
from gpufn_core.spec.schedule import Schedule
from gpufn_gateway.schedules.declared import changes

HOURLY, DAILY = Schedule("0 * * * *"), Schedule("0 6 * * *")


def record(id_: str, schedule: Schedule = HOURLY, *, declared: bool = True, created_at: float = 0.0) -> ScheduleRecord:
    function = id_.partition(".")[0]
    return ScheduleRecord(
        id=id_,
        function=function,
        schedule=schedule,
        declared=declared,
        paused=True,
        done_until=5.0,
        created_at=created_at,
    )


def test_declared_schedules_become_records() -> None:
    made, removed = changes({"a": HOURLY, "b": None}, [], 100.0, 40.0)
    assert removed == []
    assert [(each.id, each.function, each.schedule, each.declared, each.done_until) for each in made] == [
        ("a", "a", HOURLY, True, 100.0)
    ]


def test_unchanged_schedules_stay() -> None:
    known = [record("a"), record("a.x1", DAILY, declared=False)]
    assert changes({"a": HOURLY}, known, 100.0, 40.0) == ([], [])


def test_another_line_begins_now_and_stays_paused() -> None:
    (changed,), removed = changes({"a": DAILY}, [record("a")], 100.0, 40.0)
    assert (changed.schedule, changed.done_until, changed.paused, removed) == (DAILY, 100.0, True, [])


def test_undeclared_schedules_are_removed_and_added_ones_stay() -> None:
    known = [record("a"), record("a.x1", declared=False)]
    assert changes({"a": None}, known, 100.0, 40.0) == ([], ["a"])


def test_with_a_function_go_all_its_schedules_unless_it_may_be_too_new_to_be_known() -> None:
    known = [record("a"), record("a.x1", declared=False), record("a.x2", declared=False, created_at=41.0)]
    assert changes({}, known, 100.0, 40.0) == ([], ["a", "a.x1"])
