"""The loop that submits due schedules. Every gateway has one, and the controller's leader acts.

At the start of each second:
1. align the records with the schedules that functions declare
2. submit each schedule that is due, unless it was paused since the watch last reported it. A schedule whose team may
   queue no further call is tried again each second. The invocation's id is derived from the schedule and the time, so
   that a new leader, or two that both believe to lead, submit it once
3. with `GPUFN_SYNC=always`, sync the submitted calls to disk
4. record the run; remove a schedule that runs once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from gpufn_core.errors import GpufnError, IdempotencyMismatch, ScheduleNotFound
from gpufn_core.protocol.records import ScheduleRecord
from gpufn_core.spec.schedule import Schedule, due, next_time
from gpufn_gateway.auth.quota_sync import QuotaSync
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.problems import KeyLimitExceeded
from gpufn_gateway.schedules.declared import changes
from gpufn_gateway.schedules.store import Schedules
from gpufn_gateway.store_sync import StoreSync
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
_NEVER: Final = float("inf")
_SETTLED_S: Final = 60.0  # a function that is still unknown this long after its schedule was made was deleted
_APART_S: Final = 60.0  # clock skew between leaders; a later `done_until` was written by a wrong clock


class ScheduleRuns:
    def __init__(
        self,
        schedules: Schedules,
        registry: Registry,
        clock: Clock,
        disk: StoreSync,
        quotas: QuotaSync,
        *,
        leads: Callable[[], bool],
    ) -> None:
        self._schedules = schedules
        self._registry = registry
        self._clock = clock
        self._disk = disk
        self._quotas = quotas
        self._leads = leads
        self._next: dict[str, tuple[ScheduleRecord, float]] = {}  # when it is due; computed once per change
        self._logged: dict[str, str] = {}  # schedule -> the last logged reason why it waits

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with log_failures("submitting due schedules"):
                if self._leads():
                    await self.step()
            await asyncio.sleep(_TICK_S - self._clock.time() % _TICK_S)

    async def step(self) -> None:
        now = self._clock.time()
        await self._declare(now)
        known, teams = self._schedules.known, self._registry.teams
        full: set[str] = set()  # teams that may queue no further call
        for record in list(known.values()):
            if record.paused or (record.done_until <= now + _APART_S and self._due_at(record) > now):
                continue
            if full and teams.name_of(record.function) in full:
                continue
            try:
                with contextlib.suppress(ScheduleNotFound):  # removed in the meantime
                    await self._run(record.id, now)
                self._logged.pop(record.id, None)
            except GpufnError as error:
                if isinstance(error, KeyLimitExceeded):
                    full.add(teams.name_of(record.function))
                if self._logged.get(record.id) != error.message:
                    log.warning("schedule %s could not be submitted and is retried each second: %s", record.id, error)
                self._logged[record.id] = error.message
        self._next = {id_: each for id_, each in self._next.items() if id_ in known}
        self._logged = {id_: each for id_, each in self._logged.items() if id_ in known}

    async def _declare(self, now: float) -> None:
        wanted = {name: self._declared(name) for name in list(self._registry.functions)}
        put, removed = changes(wanted, self._schedules.known.values(), now, now - _SETTLED_S)
        for record in put:
            await self._schedules.declare(record)
        for id_ in removed:
            await self._schedules.delete(id_)

    def _declared(self, name: str) -> Schedule | None:
        revision = self._registry.revisions.get(name, {}).get(self._registry.functions[name].serving)
        if revision is not None:
            return None if revision.variant is not None else revision.spec.schedule
        record = self._schedules.known.get(name)  # the revision is not loaded yet: no change
        return None if record is None else record.schedule

    def _due_at(self, record: ScheduleRecord) -> float:
        entry = self._next.get(record.id)
        if entry is None or entry[0] is not record:
            at = next_time(record.schedule, record.done_until)
            if at is None:  # a one-time schedule whose time fell into a pause: run it now, which removes it
                at = _NEVER if record.schedule.at is None else record.done_until
            entry = self._next[record.id] = record, at
        return entry[1]

    async def _submit(self, record: ScheduleRecord, at: float) -> str:
        """Submit one call; return its id. Raises KeyLimitExceeded if the function's team may queue no further one."""
        account = self._registry.target(record.function, record.schedule.method).team
        if account is None:
            return (await self._schedules.submit(record, at)).id
        async with self._quotas.queueing(account, _TICK_S, 1):
            return (await self._schedules.submit(record, at)).id

    async def _run(self, id_: str, now: float) -> None:
        """Submit the due runs of a schedule, by its stored record. Raises ScheduleNotFound."""
        record = await self._schedules.stored(id_)
        if record is None or record.paused:
            return
        if record.done_until > now + _APART_S:
            log.warning("schedule %s was run by a clock that was far ahead; it continues from now", id_)
            await self._schedules.change(id_, lambda stored: msgspec.structs.replace(stored, done_until=now))
            return
        invocation = record.invocation
        times = due(record.schedule, record.done_until, now)
        for at in times:
            with contextlib.suppress(IdempotencyMismatch):  # submitted already, with the schedule as it was then
                invocation = await self._submit(record, at)
        if times:
            await self._disk.sync_calls()
        if record.schedule.at is not None:
            await self._schedules.delete(id_)
            return

        def done(stored: ScheduleRecord) -> ScheduleRecord:
            if stored.done_until >= now or stored.schedule != record.schedule:
                return stored
            return msgspec.structs.replace(stored, done_until=now, invocation=invocation)

        await self._schedules.change(id_, done)
