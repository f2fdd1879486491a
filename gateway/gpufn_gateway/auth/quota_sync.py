"""Calls are held against the limits of their API key (`quotas` decides), and gateways tell each other what was used.

A key without limits costs nothing here. With one gateway the limits hold exactly. With several, each tells the others
once a second: of rate and concurrency, a key may get as much more as it uses at the others within that second. How many
calls are queued is asked of the bus, which knows of all; what calls took, of the records that runners write every ten
seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, Protocol

import msgspec

from gpufn_core.domain.metering import STORED_EACH_S, Usage, UsageKey, day_of
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import GatewayReport
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.quotas import COUNT_HOLDS_S, Use, count_again_at
from gpufn_gateway.background_loop import tried_again
from gpufn_gateway.problems import Headers, Limited
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


class KeyUses:
    """`count(key)`: how many submitted calls of a key have not ended. `spent(day)`: what the calls of each key took on
    that day of UTC."""

    def __init__(
        self,
        name: str,
        bus: Publisher,
        *,
        count: Callable[[str], Awaitable[int]],
        spent: Callable[[str], Awaitable[Mapping[str, Usage]]],
        clock: Clock,
    ) -> None:
        self._name = name
        self._bus = bus
        self._count = count
        self._spent = spent
        self._clock = clock
        self._uses: dict[str, Use] = {}
        self._is_new = asyncio.Event()  # a key whose seconds have not been looked up
        self._counting: dict[str, asyncio.Lock] = {}

    @classmethod
    def on(cls, bus: Bus, usage: KeyValue, name: str, clock: Clock) -> KeyUses:
        """On a real bus, hearing what other gateways tell. `usage` has what calls took."""

        async def count(key: str) -> int:
            stored = await streams.messages_per_subject(bus, subjects.ASYNC, subjects.async_queues_of(key))
            return sum(stored.values())

        async def spent(day: str) -> Mapping[str, Usage]:
            by_key: dict[str, Usage] = {}
            for entry in await usage.entries(f"{day}."):
                key = UsageKey.of_record(entry.key).key
                by_key[key] = by_key.get(key, Usage()) + _usage.decode(entry.value)
            return by_key

        self = cls(name, bus, count=count, spent=spent, clock=clock)
        bus.subscribe(subjects.GATEWAY_REPORTS, decoded(_report, self.heard))
        return self

    def admit(self, principal: Principal) -> None:
        """One call is made. Raises Limited."""
        if (use := self._use(principal)) is not None and (refusal := use.admit(now := self._clock.monotonic())):
            raise Limited(refusal.message, retry_after_s=refusal.retry_after_s, headers=use.headers(now))

    def begin(self, principal: Principal) -> Callable[[object], None] | None:
        """A call that is waited for begins: what is to be called at its end, if anything. Raises Limited."""
        use = self._use(principal)
        if use is None:
            return None
        began = self._clock.monotonic()
        if (refusal := use.begin(began)) is not None:
            raise Limited(refusal.message, retry_after_s=refusal.retry_after_s, headers=use.headers(began))
        return lambda _: use.end(self._clock.monotonic() - began)

    @contextlib.asynccontextmanager
    async def queueing(self, principal: Principal, retry_after_s: float, calls: int) -> AsyncIterator[None]:
        """Submitted calls are stored inside. Raises Limited: it is worth trying again after `retry_after_s`."""
        use = self._use(principal)
        if use is None:
            yield
            return
        await self._look_at_queue(use)
        if (why := use.queue(calls)) is not None:
            raise Limited(why, retry_after_s=retry_after_s, headers=use.headers(self._clock.monotonic()))
        try:
            yield
        finally:
            use.stored(calls)

    async def _look_at_queue(self, use: Use) -> None:
        came = self._clock.monotonic()
        await self._count_queue(use, came - COUNT_HOLDS_S)
        if use.is_full:  # nobody is refused for calls whose end he has seen
            again_at = count_again_at(came)
            await asyncio.sleep(again_at - self._clock.monotonic())
            await self._count_queue(use, again_at)

    async def _count_queue(self, use: Use, since: float) -> None:
        """Unless it was counted since then."""
        if not use.needs_count(since):
            return
        async with self._counting.setdefault(use.key, asyncio.Lock()):
            if use.needs_count(since):
                began, storing = self._clock.monotonic(), use.storing
                use.counted(await self._count(use.key), storing, began)

    async def run(self) -> None:
        """Look up what calls took, every ten seconds and when a key is new; until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STORED_EACH_S):
                    await self._is_new.wait()
            self._is_new.clear()
            with tried_again("looking up what the calls of keys took today"):
                await self.look_up()

    async def look_up(self) -> None:
        by_day = [use for use in self._uses.values() if use.is_by_day]
        if not by_day:
            return
        time, now = self._clock.time(), self._clock.monotonic()
        spent = await self._spent(day_of(time))
        for use in by_day:
            use.spent(spent.get(use.key, Usage()), now + _DAY_S - time % _DAY_S)

    def headers(self, principal: Principal) -> Headers:
        """How much is left, for the answer."""
        use = self._use(principal)
        return [] if use is None else use.headers(self._clock.monotonic())

    def tell(self) -> None:
        """About once a second."""
        uses = tuple(told for use in self._uses.values() if (told := use.tell()) is not None)
        if uses:
            try:
                self._bus.publish(subjects.gateway_report(self._name), encode(GatewayReport(self._name, uses)))
            except BusUnavailable as error:
                log.debug("other gateways do not hear what keys have used: %s", error)

    def _use(self, principal: Principal) -> Use | None:
        if principal.limits is None:
            return None
        use = self._uses.get(principal.id)
        if use is None:
            use = self._uses[principal.id] = Use(principal.id, principal.limits, self._clock.monotonic())
        elif use.limits is not principal.limits:  # changed, or told once more, as after a reconnect
            use.change(principal.limits, self._clock.monotonic())
        else:
            return use
        if use.is_by_day:
            self._is_new.set()
        return use

    def forget(self, key: str) -> None:
        """There is no such key any more."""
        self._uses.pop(key, None)
        self._counting.pop(key, None)

    def heard(self, report: GatewayReport) -> None:
        """What another gateway told; our own is not for us."""
        now = self._clock.monotonic()
        for told in report.uses if report.gateway != self._name else ():
            if (use := self._uses.get(told.key)) is not None:
                use.heard(report.gateway, told, now)
