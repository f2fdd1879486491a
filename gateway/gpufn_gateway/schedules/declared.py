"""The schedules that functions declare, as changes to the records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from gpufn_core.protocol.records import ScheduleRecord
from gpufn_core.spec.schedule import Schedule


class Changes(NamedTuple):
    """`put` are new or different, `removed` ids of records that nobody wants."""

    put: list[ScheduleRecord]
    removed: list[str]


def changes(
    wanted: Mapping[str, Schedule | None], known: Iterable[ScheduleRecord], now: float, settled_before: float
) -> Changes:
    """`wanted`: every function, and its own schedule. One that is new or different begins now, and stays paused.

    Records made at `settled_before` or later are left when their function is not known: it may be as new.
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
