"""What one Revision takes from the bus on this node: a standing pull of the sync queue, polls of the async queue.

Room for a call is worth one credit, and the credit is with one queue at a time (order.py says which). Two exceptions: a
doorbell polls the async queue though the sync queue holds the credit; and calls that come by the lane take room whose
credits stand. The owner has to do something about a delivery without room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from gpufn.bus import streams
from gpufn.bus.connection import Bus
from gpufn.bus.consumer import Delivery, Pull
from gpufn.errors import GpufnError
from gpufn.protocol import subjects
from gpufn.revision import Revision
from gpufn_runtime.runner.order import QueueOrder

log = logging.getLogger(__name__)

ACK_WAIT_S = 8.0
_UNBOUNDED = -1  # the credits are the bound


class Intake:
    """`room()` is how many deliveries may come now, of the `capacity()` that may be here at a time; `take(delivery)`
    takes one, or hands it back."""

    def __init__(
        self,
        bus: Bus,
        revision: Revision,
        *,
        room: Callable[[], int],
        capacity: Callable[[], int],
        take: Callable[[Delivery], None],
    ) -> None:
        self._bus = bus
        self._revision = revision
        self._room = room
        self._capacity = capacity
        self._take = take
        self._order = QueueOrder()
        self._polling = 0
        self._async_is_known_to_wait = False  # not merely likely, as after a while without a look
        self._async_was_handed_back = False  # and no empty poll since
        self._sync: Pull | None = None
        self._async: Pull | None = None
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Start to pull, once the queues' consumers exist; until then nothing is taken."""
        self._spawn(self._open())

    async def _open(self) -> None:
        try:
            await self._ensure_consumers()
        except GpufnError as error:
            log.warning("the queues of %s cannot be pulled from yet: %s", self._revision, error)
            return  # `tick` comes back here
        if self._sync is not None or self._is_closed:
            return
        name, number = self._revision.function, self._revision.number
        self._sync = Pull(
            self._bus, subjects.SYNC, subjects.sync_consumer(name, number), self._on_sync,
            on_missing=self._on_missing,
        )  # fmt: skip
        self._async = Pull(
            self._bus, subjects.ASYNC, subjects.async_consumer(name, number), self._on_async,
            on_empty=self._on_async_empty, on_missing=self._on_missing,
        )  # fmt: skip
        self.offer()
        self._look_for_async()

    def close(self) -> None:
        self._is_closed = True
        for pull in (self._sync, self._async):
            if pull is not None:
                pull.withdraw()
        self._sync = self._async = None

    def offer(self) -> None:
        """Turn the room that no queue knows of into credits.

        A request for one credit costs the server as much as one for many. So while there is much room, and so credit,
        what becomes free is saved up until it is a quarter of all.
        """
        if self._sync is None:
            return
        room = self._room() - self._sync.credits - self._polling
        while room > 0 and self._order.offers_async_first():
            self._poll_async()
            room -= 1
        if room > 0:
            capacity = self._capacity()
            if 4 * room >= capacity or 2 * self._sync.credits < capacity:
                self._sync.grant(room)
        # While the sync queue is empty its credits only stand, and a backlog must not wait for a look each second.
        if self._async_is_known_to_wait and not self._order.sync_pending and (idle := self._room() - self._polling) > 0:
            self._poll_async(idle)

    @property
    def others_wait(self) -> bool:
        """Calls are known to be in one of the queues: a call that comes past them has to get in line."""
        return self._order.sync_pending > 0 or self._async_is_known_to_wait

    def shrink(self) -> None:
        """Room is gone: take the credits for it back, or each would bring a delivery that nobody can run."""
        if self._sync is not None:
            self._sync.limit(max(0, self._room() - self._polling))

    def handed_back(self, *, is_submitted: bool) -> None:
        """A delivery found no room: it waits in its queue again, where no delivery's `pending` counts it."""
        if is_submitted:
            self._order.async_waits = self._async_is_known_to_wait = self._async_was_handed_back = True
        else:
            self._order.sync_pending = max(1, self._order.sync_pending)

    def on_doorbell(self) -> None:
        """An async call was queued."""
        self._async_is_known_to_wait = True
        self._look_for_async()

    def _look_for_async(self) -> None:
        self._order.async_waits = True
        if not self._polling and self._room() > 0:
            self._poll_async()

    def tick(self, now: float) -> None:
        """Each second: the pulls' watchdogs, and a look at the async queue in case a doorbell was missed."""
        if self._sync is None:
            self.open()
        for pull in (self._sync, self._async):
            if pull is not None:
                pull.tick(now)
        if self._sync is not None and self._sync.credits:
            self._order.sync_pending = 0  # what waited there has been taken, or is gone
        self._look_for_async()

    # --- from the pulls -----------------------------------------------------------------------------------------------

    def _poll_async(self, credits: int = 1) -> None:  # noqa: A002
        if self._async is not None:
            self._polling += credits
            self._async.poll(credits)

    def _on_async_empty(self, unused: int) -> None:
        self._polling -= unused
        self._order.async_waits = self._async_is_known_to_wait = self._async_was_handed_back = False
        self.offer()

    def _on_async(self, delivery: Delivery) -> None:
        self._polling -= 1
        waits = delivery.pending > 0 or self._async_was_handed_back
        self._order.async_waits = self._async_is_known_to_wait = waits
        self._take(delivery)
        if waits:
            self.offer()

    def _on_sync(self, delivery: Delivery) -> None:
        self._order.sync_pending = delivery.pending
        self._take(delivery)

    # --- consumers ----------------------------------------------------------------------------------------------------

    def _on_missing(self) -> None:
        self._spawn(self._recreate())

    async def _recreate(self) -> None:
        """SYNC lives in the server's memory: after its restart the stream and our consumer are made again."""
        try:
            await streams.ensure_streams(self._bus)
            await self._ensure_consumers()
        except GpufnError as error:
            log.warning("the queues of %s cannot be pulled from yet: %s", self._revision, error)
            return  # each tick of the Pull comes back here
        for pull in (self._sync, self._async):
            if pull is not None:
                pull.retry()

    async def _ensure_consumers(self) -> None:
        name, number = self._revision.function, self._revision.number
        await streams.ensure_consumer(
            self._bus, subjects.SYNC, subjects.sync_consumer(name, number), subjects.sync_queue(name, number),
            ack_wait_s=ACK_WAIT_S, max_ack_pending=_UNBOUNDED,
        )  # fmt: skip
        await streams.ensure_consumer(
            self._bus, subjects.ASYNC, subjects.async_consumer(name, number), subjects.async_queue(name, number),
            ack_wait_s=ACK_WAIT_S, max_ack_pending=_UNBOUNDED,
        )  # fmt: skip

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"queues of {self._revision}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
