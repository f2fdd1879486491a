"""Who leads: a record that its holder renews and that the server removes when the holder does not.

    kv = await KeyValue.open(bus, subjects.LEASES)   # on disk: epochs must not start again after a restart
    lease = Lease(kv, "controller", holder="gateway-a1")
    if await lease.try_acquire(time.monotonic()): ...act, and send `lease.epoch` with every order...

The record carries its own time to live (`Nats-TTL`), so that acquiring and renewing are one compare-and-set publish
each. A lease that is released leaves a marker for a second. `holder` names this process and no other, or two of them
would think themselves one. The epoch is the revision at which this term began: a later holder's is always greater, so
whoever takes orders refuses those with a smaller epoch than it knows of; of reports, `Fence` says which count. The
bucket leaves no markers behind expired records.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from gpufn_core.errors import BusUnavailable, Conflict, GpufnError
from gpufn_platform.bus.storage.key_value import KeyValue

_MARKED_S: Final = 1.0  # the server's shortest
_TTL_S: Final = 5.0  # so long nobody hears of a holder that is gone


class Fence:
    """Who hears a holder's reports lets in those of the newest term that was heard of lately.

    Lately, for the bus may begin anew and count from one: a holder that leads no more has found that out by then.

    >>> fence = Fence()
    >>> [fence.lets_in(epoch, now) for epoch, now in ((7, 0.0), (6, 5.0), (7, 6.0), (2, 12.0), (1, 13.0))]
    [True, False, True, True, False]
    """

    def __init__(self, ttl_s: float = _TTL_S) -> None:
        self._ttl_s = ttl_s
        self._epoch = 0
        self._heard_at = 0.0

    def lets_in(self, epoch: int, now: float) -> bool:
        if epoch < self._epoch and now - self._heard_at <= self._ttl_s:
            return False
        self._epoch, self._heard_at = epoch, now
        return True


class Lease:
    def __init__(self, kv: KeyValue, name: str, holder: str, ttl_s: float = _TTL_S) -> None:
        self._kv = kv
        self._name = name
        self._holder = holder.encode()
        self._ttl_s = ttl_s
        self._revision = 0  # of our last successful publish; 0: none
        self._held_until = 0.0
        self._writing: asyncio.Future[int] | None = None  # our last publish, which goes out though we are cancelled
        self.epoch = 0

    def is_held(self, now: float) -> bool:
        """Certain, also without asking the server: its clock for this term started after ours."""
        return self._revision > 0 and now < self._held_until

    async def try_acquire(self, now: float) -> bool:
        """Acquire or renew; call it a few times per `ttl_s` with a monotonic `now`. False: another holds it.

        While the bus is away a term that runs is kept to its end.
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
        """End the term now, so that a successor need not wait. Touches nobody else's term.

        Who was cancelled in the middle of acquiring or renewing it holds it all the same: that answer is waited for.
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
            # Ours, when the answer to an earlier attempt was lost.
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
        """As often as it must be renewed, so long may one attempt take."""
        timeout_s = self._ttl_s / 3 if self._kv.bus.connected else 0
        self._writing = asyncio.ensure_future(
            self._kv.update(self._name, self._holder, revision, ttl_s=self._ttl_s, timeout_s=timeout_s)
        )
        return await asyncio.shield(self._writing)

    async def _adopt(self) -> bool:
        """Go on from the record as it is, if we wrote it."""
        entry = await self._kv.get(self._name)
        if entry is None or entry.value != self._holder:
            return False
        self._revision = await self._write(entry.revision)
        return True
