"""Enforce the limits of API keys and teams (`quotas` decides), and exchange usage between gateways.

A call counts against its key, and against the team of its function. A holder without limits costs nothing here. With
one gateway the limits are exact. With several, each reports its usage to the others once a second. So a holder can
exceed its rate and concurrency by its usage at the other gateways within that second. The number of queued calls comes
from the bus, which has them all. Run time and GPU seconds come from records that runners write every ten seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Final, Protocol

import msgspec

from gpufn_core.domain.team import Teams
from gpufn_core.domain.usage import STORE_INTERVAL_S, Usage, UsageKey, day_of
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.protocol.reports import GatewayReport
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.quotas import COUNT_TTL_S, KeyQuota, recount_at
from gpufn_gateway.auth.team_account import quota_id
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.problems import Headers, KeyLimitExceeded
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

_DAY_S: Final = 86_400.0

_usage = msgspec.msgpack.Decoder(Usage)
_report = msgspec.msgpack.Decoder(GatewayReport)


class Publisher(Protocol):
    def publish(self, subject: str, payload: bytes) -> None: ...


class Holder(Protocol):
    """A key or a team, with its limits."""

    @property
    def id(self) -> str: ...

    @property
    def limits(self) -> KeyLimits | None: ...


class QuotaSync:
    """The quotas of all keys and teams at this gateway.

    `count_queued(id)` returns the number of submitted calls of a holder that have not ended. `usage_today(day)` returns
    the usage of each holder on that UTC day.
    """

    def __init__(
        self,
        name: str,
        bus: Publisher,
        *,
        count_queued: Callable[[str], Awaitable[int]],
        usage_today: Callable[[str], Awaitable[Mapping[str, Usage]]],
        clock: Clock,
    ) -> None:
        self._name = name
        self._bus = bus
        self._count_queued = count_queued
        self._usage_today = usage_today
        self._clock = clock
        self._quotas: dict[str, KeyQuota] = {}
        self._has_new_key = asyncio.Event()  # there is a key whose usage was not read yet
        self._count_locks: dict[str, asyncio.Lock] = {}

    @classmethod
    def connect(cls, bus: Bus, usage: KeyValue, teams: Teams, name: str, clock: Clock) -> QuotaSync:
        """Create an instance on a bus and subscribe to the reports of other gateways. `usage` is the usage bucket."""

        async def count_queued(id_: str) -> int:
            is_team = id_.startswith(quota_id(""))
            queues = subjects.async_queues("*") if is_team else subjects.async_queues_of(id_)
            stored = await streams.messages_per_subject(bus, subjects.ASYNC, queues)
            return sum(
                count
                for subject, count in stored.items()
                if not is_team or quota_id(teams.name_of(subjects.queue_owner(subject)[0])) == id_
            )

        async def usage_today(day: str) -> Mapping[str, Usage]:
            by_holder: dict[str, Usage] = {}
            for entry in await usage.entries(f"{day}."):
                key, used = UsageKey.of_record(entry.key), _usage.decode(entry.value)
                for holder in (key.key, quota_id(teams.name_of(key.function))):
                    by_holder[holder] = by_holder.get(holder, Usage()) + used
            return by_holder

        self = cls(name, bus, count_queued=count_queued, usage_today=usage_today, clock=clock)
        bus.subscribe(subjects.GATEWAY_REPORTS, decoded(_report, self.on_report))
        return self

    def admit(self, holder: Holder) -> None:
        """Count one call against the rate, and check the usage of the day. Raises KeyLimitExceeded."""
        if (quota := self._quota(holder)) is not None:
            now = self._clock.monotonic()
            if (refusal := quota.admit(now)) is not None:
                raise KeyLimitExceeded(*refusal, quota.headers(now))

    def begin(self, principal: Principal) -> Callable[[object], None] | None:
        """Start a call that a client waits for. Return a callback for its end, if required.

        Raises KeyLimitExceeded.
        """
        quota = self._quota(principal)
        if quota is None:
            return None
        started_at = self._clock.monotonic()
        if (refusal := quota.begin(started_at)) is not None:
            raise KeyLimitExceeded(*refusal, quota.headers(started_at))
        return lambda _: quota.end(self._clock.monotonic() - started_at)

    @contextlib.asynccontextmanager
    async def queueing(self, holder: Holder, retry_after_s: float, calls: int) -> AsyncIterator[None]:
        """Context in which submitted calls are stored. Raises KeyLimitExceeded, with `retry_after_s`."""
        quota = self._quota(holder)
        if quota is None:
            yield
            return
        await self._update_queue_count(quota)
        if (reason := quota.start_storing(calls)) is not None:
            raise KeyLimitExceeded(reason, retry_after_s, quota.headers(self._clock.monotonic()))
        try:
            yield
        finally:
            quota.finish_storing(calls)

    async def _update_queue_count(self, quota: KeyQuota) -> None:
        arrived_at = self._clock.monotonic()
        await self._recount(quota, arrived_at - COUNT_TTL_S)
        if quota.is_full:  # recount: do not reject a client because of calls that it has already seen end
            recount_time = recount_at(arrived_at)
            await asyncio.sleep(recount_time - self._clock.monotonic())
            await self._recount(quota, recount_time)

    async def _recount(self, quota: KeyQuota, since: float) -> None:
        """Count the queued calls, unless they were counted after `since`."""
        if not quota.needs_count(since):
            return
        async with self._count_locks.setdefault(quota.key, asyncio.Lock()):
            if quota.needs_count(since):
                started_at, storing = self._clock.monotonic(), quota.storing
                quota.set_queued(await self._count_queued(quota.key), storing, started_at)

    async def run(self) -> None:
        """Read the usage of today every ten seconds, and when a key is new, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STORE_INTERVAL_S):
                    await self._has_new_key.wait()
            self._has_new_key.clear()
            with log_failures("reading today's usage of API keys"):
                await self.refresh_usage()

    async def refresh_usage(self) -> None:
        with_daily_limits = [quota for quota in self._quotas.values() if quota.has_daily_limits]
        if not with_daily_limits:
            return
        time, now = self._clock.time(), self._clock.monotonic()
        usage_today = await self._usage_today(day_of(time))
        for quota in with_daily_limits:
            quota.set_usage(usage_today.get(quota.key, Usage()), now + _DAY_S - time % _DAY_S)

    async def count_queued(self, holder: str) -> int:
        """Return the number of submitted calls of a key or team that have not ended."""
        return await self._count_queued(holder)

    async def usage_today(self) -> Mapping[str, Usage]:
        """Return the usage of each key and team on this UTC day."""
        return await self._usage_today(day_of(self._clock.time()))

    def limits_used(self) -> Iterator[tuple[str, str, float]]:
        """Yield holder, limit and its used part, of the holders that made calls at this gateway."""
        now = self._clock.monotonic()
        for holder, quota in self._quotas.items():
            for limit, ratio in quota.used(now).items():
                yield holder, limit, ratio

    def headers(self, principal: Principal) -> Headers:
        """Return the RateLimit headers of the key, for the response."""
        quota = self._quota(principal)
        return [] if quota is None else quota.headers(self._clock.monotonic())

    def publish(self) -> None:
        """Report usage to the other gateways. Call it about once a second."""
        reports = tuple(report for quota in self._quotas.values() if (report := quota.take_report()) is not None)
        if reports:
            try:
                self._bus.publish(subjects.gateway_report(self._name), encode(GatewayReport(self._name, reports)))
            except BusUnavailable as error:
                log.debug("cannot report the usage of keys to other gateways: %s", error)

    def _quota(self, holder: Holder) -> KeyQuota | None:
        limits = holder.limits
        if limits is None:
            return None
        quota = self._quotas.get(holder.id)
        if quota is None:
            _, is_team, team = holder.id.partition("/")
            named = f"The team {team}" if is_team else "This key"
            quota = self._quotas[holder.id] = KeyQuota(holder.id, limits, self._clock.monotonic(), named)
        elif quota.limits is not limits:  # changed, or received again after a reconnect
            quota.change(limits, self._clock.monotonic())
        else:
            return quota
        if quota.has_daily_limits:
            self._has_new_key.set()
        return quota

    def forget(self, key: str) -> None:
        """Remove a key that was deleted."""
        self._quotas.pop(key, None)
        self._count_locks.pop(key, None)

    def on_report(self, report: GatewayReport) -> None:
        """Add the report of another gateway; ignore our own."""
        now = self._clock.monotonic()
        for key_use in report.uses if report.gateway != self._name else ():
            if (quota := self._quotas.get(key_use.key)) is not None:
                quota.add_report(report.gateway, key_use, now)
