"""Leader election: a record that its holder renews and that the server expires otherwise.

    kv = await KeyValue.open(bus, subjects.LEASES)   # on disk: epochs must not start again after a restart
    lease = LeaderLease(kv, "controller", holder="gateway-a1")
    if await lease.try_acquire(time.monotonic()): ...act, and send `lease.epoch` with every order...

The record carries its own time to live (`Nats-TTL`), so acquiring and renewing are one compare-and-set publish each.
A released lease leaves a marker for one second. `holder` must be unique to this process, or two processes would both
believe they hold the lease. The epoch is the revision at which this term began, so a later holder's epoch is always
greater: receivers of orders reject epochs smaller than the greatest known one. For reports, `Fence` decides. The bucket
leaves no markers for expired records.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from gpufn_core.errors import BusUnavailable, Conflict, GpufnError
from gpufn_platform.bus.storage.key_value import KeyValue

_MARKED_S: Final = 1.0  # the server's minimum
_TTL_S: Final = 5.0  # how long the system is without a leader after the holder died


class Fence:
    """Filter for a leader's reports: accepts reports of the newest term seen recently.

    An older term is accepted again after `ttl_s`, because the bus may start afresh and count revisions from one. By
    then a former leader knows that it no longer leads.
    >>> fence = Fence()
    >>> [fence.accepts(epoch, now) for epoch, now in ((7, 0.0), (6, 5.0), (7, 6.0), (2, 12.0), (1, 13.0))]
    [True, False, True, True, False]
    """

    def __init__(self, ttl_s: float = _TTL_S) -> None:
        self._ttl_s = ttl_s
        self._epoch = 0
        self._seen_at = 0.0

    def accepts(self, epoch: int, now: float) -> bool:
        """Return whether to accept a report of term `epoch`."""
        if epoch < self._epoch and now - self._seen_at <= self._ttl_s:
            return False
        self._epoch, self._seen_at = epoch, now
        return True


class LeaderLease:
    def __init__(self, kv: KeyValue, name: str, holder: str, ttl_s: float = _TTL_S) -> None:
        self._kv = kv
        self._name = name
        self._holder = holder.encode()
        self._ttl_s = ttl_s
        self._revision = 0  # revision of our last successful publish; 0: none
        self._held_until = 0.0
        self._writing: asyncio.Future[int] | None = None  # our last publish; it goes out even if we are cancelled
        self.epoch = 0

    def is_held(self, now: float) -> bool:
        """Return whether this process certainly holds the lease, without asking the server: our clock started first."""
        return self._revision > 0 and now < self._held_until

    async def try_acquire(self, now: float) -> bool:
        """Acquire or renew; call it a few times per `ttl_s` with a monotonic `now`. False: another process holds it.

        While the bus is unavailable, a running term continues to its end.
        """
        try:
            if not self._revision:
                await self._begin()
            elif not await self._renew():
                self._revision = 0
                await self._begin()
        except Conflict:
            return False
        except BusUnavailable:
            if self.is_held(now):
                return True
            raise
        self._held_until = now + self._ttl_s
        return True

    async def release(self) -> None:
        """End the term now, so that a successor need not wait. Does not affect another holder's term.

        If `try_acquire` was cancelled in the middle, its publish may still succeed, so wait for that response.
        """
        revision, self._revision = self._revision, 0
        if self._writing is not None:
            with contextlib.suppress(GpufnError):
                revision = max(revision, await self._writing)
        if revision:
            with contextlib.suppress(Conflict):
                await self._kv.delete(self._name, revision, marked_s=_MARKED_S)

    async def _begin(self) -> None:
        try:
            self._revision = await self._write(0)
        except Conflict:
            # Our own record, if the response to an earlier attempt was lost.
            if not await self._adopt():
                self._revision = await self._write(await self._kv.deleted_at(self._name))
        self.epoch = self._revision

    async def _renew(self) -> bool:
        try:
            self._revision = await self._write(self._revision)
        except Conflict:
            return await self._adopt()
        return True

    async def _write(self, revision: int) -> int:
        """Publish the record; one attempt may take up to the renewal interval."""
        timeout_s = self._ttl_s / 3 if self._kv.bus.connected else 0
        self._writing = asyncio.ensure_future(
            self._kv.update(self._name, self._holder, revision, ttl_s=self._ttl_s, timeout_s=timeout_s)
        )
        return await asyncio.shield(self._writing)

    async def _adopt(self) -> bool:
        """Continue from the current record if this process wrote it."""
        entry = await self._kv.get(self._name)
        if entry is None or entry.value != self._holder:
            return False
        self._revision = await self._write(entry.revision)
        return True
