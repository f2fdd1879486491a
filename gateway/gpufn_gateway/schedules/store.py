"""The schedule records, kept in memory by a watch, and the calls that they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gpufn_core.encoding import media
from gpufn_core.errors import CapacityError, Conflict, InvalidInput, ScheduleNotFound
from gpufn_core.ids import invocation_id_for, new_invocation_id, new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import CallRecord, ScheduleRecord
from gpufn_core.spec.schedule import Schedule, next_time
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.target import Target
from gpufn_gateway.traces.tracing import Tracing
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import Entry, KeyValue, Watch
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.records import call_records

_MAX_SCHEDULES: Final = 10_000  # the leader checks all of them each second
_MAX_OF_TEAM: Final = 2_000

_record = msgspec.msgpack.Decoder(ScheduleRecord)
_encode = msgspec.msgpack.Encoder().encode


class Schedules:
    def __init__(self, bus: Bus, bucket: KeyValue, registry: Registry, clock: Clock) -> None:
        self._bus = bus
        self._bucket = bucket
        self._registry = registry
        self.tracing: Tracing | None = None
        self._clock = clock
        self._watch: Watch | None = None
        self.known: dict[str, ScheduleRecord] = {}

    async def start(self) -> None:
        """Start the watch. Returns when all existing records have been read."""
        self._watch = await self._bucket.watch(self._on_change)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    def get(self, id: str) -> ScheduleRecord:  # noqa: A002
        """Raises ScheduleNotFound."""
        record = self.known.get(id)
        if record is None:
            raise no_such_schedule(id)
        return record

    async def add(self, target: Target, schedule: Schedule, now: float | None = None) -> ScheduleRecord:
        """Add a schedule whose runs begin after `now`, by default the time of this call. Raises InvalidInput if its
        arguments do not fit or its time has passed; CapacityError."""
        now = self._clock.time() if now is None else now
        schedule = msgspec.structs.replace(schedule, method=target.method.name)
        target.signature.check(msgspec.json.encode(schedule.arguments))
        if next_time(schedule, now) is None:
            raise InvalidInput("the time of this schedule has already passed", field="at")
        if len(self.known) >= _MAX_SCHEDULES:
            raise CapacityError(
                f"There are {_MAX_SCHEDULES:,} schedules already: remove some with `gpufn schedules rm`."
            )
        self._check_team(target.name)
        id_ = f"{target.name}.{new_ulid()[-8:]}"
        record = ScheduleRecord(id=id_, function=target.name, schedule=schedule, done_until=now, created_at=now)
        await self._bucket.create(id_, _encode(record))
        return record

    def _check_team(self, function: str) -> None:
        """Raise CapacityError if the team of a function has so many schedules that there would be none for others."""
        teams = self._registry.teams
        team = teams.name_of(function)
        if len(teams) and sum(teams.name_of(each.function) == team for each in self.known.values()) >= _MAX_OF_TEAM:
            raise CapacityError(
                f"Its team has {_MAX_OF_TEAM:,} schedules already: remove some with `gpufn schedules rm`."
            )

    async def pause(self, id: str, paused: bool) -> ScheduleRecord:  # noqa: A002
        """Pause or resume a schedule. Missed runs are not made up for. Raises ScheduleNotFound."""
        now = self._clock.time()

        def change(record: ScheduleRecord) -> ScheduleRecord:
            if record.paused is paused:
                return record
            done_until = record.done_until if paused else max(record.done_until, now)
            return msgspec.structs.replace(record, paused=paused, done_until=done_until)

        return await self.change(id, change)

    async def remove(self, id: str) -> None:  # noqa: A002
        """Remove a schedule. Raises ScheduleNotFound; Conflict for a schedule that a function declares."""
        if self.get(id).declared:
            raise Conflict(f"{id} declares its schedule in code: deploy it without one, or pause the schedule.")
        await self.delete(id)

    async def stored(self, id: str) -> ScheduleRecord | None:  # noqa: A002
        """Return the stored record: the one in memory may be older."""
        entry = await self._bucket.get(id)
        return None if entry is None else _record.decode(entry.value)

    async def declare(self, record: ScheduleRecord) -> None:
        """Store a function's declared schedule. A changed one starts at `done_until`. A schedule that was paused in the
        meantime stays paused."""

        def changed(entry: Entry | None) -> bytes:
            if entry is None:
                return _encode(record)
            stored = _record.decode(entry.value)
            if stored.schedule == record.schedule:
                return entry.value
            return _encode(msgspec.structs.replace(stored, schedule=record.schedule, done_until=record.done_until))

        await self._bucket.change(record.id, changed)

    async def delete(self, id: str) -> None:  # noqa: A002
        """Delete a schedule, if it exists."""
        if await self._bucket.get(id) is not None:
            await self._bucket.delete(id)

    async def change(self, id: str, change: Callable[[ScheduleRecord], ScheduleRecord]) -> ScheduleRecord:  # noqa: A002
        """Change the stored record by compare-and-set. Raises ScheduleNotFound."""

        def changed(entry: Entry | None) -> bytes:
            if entry is None:
                raise no_such_schedule(id)
            return _encode(change(_record.decode(entry.value)))

        stored = await self._bucket.change(id, changed)
        return _record.decode(stored.value)

    async def submit(
        self, record: ScheduleRecord, at: float | None = None, *, owner: str = subjects.PLATFORM
    ) -> CallRecord:
        """Submit the call for the time `at`: always the same invocation, however often it is submitted. Without `at`,
        submit a new one. `owner` is the id of the API key that requests it, if any."""
        schedule = record.schedule
        now = self._clock.time()
        invocation = new_invocation_id()
        if at is not None:
            invocation = invocation_id_for(record.function, f"schedule {record.id}", f"{at:.0f}")
        target = self._registry.target(record.function, schedule.method).of(invocation)
        request = CallRequest(
            target.revision,
            target.method.name,
            media.JSON,
            msgspec.json.encode(schedule.arguments),
            accept=media.JSON,
            deadline=0.0,
            priority=schedule.priority,
            owner=owner,
            trace="" if self.tracing is None else self.tracing.begin(),
        )
        return await call_records.submit(self._bus, request, now=now, invocation=invocation)

    def _on_change(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self.known.pop(key, None)
        else:
            self.known[key] = _record.decode(entry.value)


def no_such_schedule(id: str) -> ScheduleNotFound:  # noqa: A002
    return ScheduleNotFound(f"There is no schedule {id[:100]!r}.")
