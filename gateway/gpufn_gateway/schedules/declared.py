"""Schedules that functions declare, as changes to the schedule records. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from gpufn_core.protocol.records import ScheduleRecord
from gpufn_core.spec.schedule import Schedule


class Changes(NamedTuple):
    """`put` are new or changed records, `removed` the ids of records that are no longer wanted."""

    put: list[ScheduleRecord]
    removed: list[str]


def changes(
    wanted: Mapping[str, Schedule | None], known: Iterable[ScheduleRecord], now: float, settled_before: float
) -> Changes:
    """`wanted` maps every function to its declared schedule. A new or changed schedule starts now; a paused one stays
    paused.

    Records made at `settled_before` or later are kept if their function is unknown: the function may be new too.
    """
    records = {record.id: record for record in known}
    put = []
    for function, schedule in wanted.items():
        if schedule is None:
            continue
        record = records.get(function)
        if record is None:
            record = ScheduleRecord(
                id=function, function=function, schedule=schedule, declared=True, done_until=now, created_at=now
            )
            put.append(record)
        elif record.schedule != schedule:
            put.append(msgspec.structs.replace(record, schedule=schedule, done_until=now))
    removed = [
        record.id
        for record in records.values()
        if (record.declared and wanted.get(record.function) is None)
        or (record.function not in wanted and record.created_at < settled_before)
    ]
    return Changes(put, removed)
