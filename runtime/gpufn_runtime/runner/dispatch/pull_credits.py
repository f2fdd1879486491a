"""What one Revision takes from the bus on this node: a standing pull of the sync queue of class normal, polls of the
other queues. Those of the classes hi and low are opened when a call is first in one: most functions have none, and a
consumer takes the server milliseconds to make.

Room for a call is worth one credit, and the credit is with one queue at a time (order.py says which). Two exceptions: a
doorbell, or a queue that is known to wait, is polled for though the standing pull holds the credit; and calls that come
by the lane take room whose credits stand. The owner has to do something about a delivery without room.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import GpufnError
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.spec.priority import Priority, QueueKind
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.delivery import Delivery, Ledger
from gpufn_platform.queue.puller import Pull
from gpufn_runtime.runner.dispatch.queue_choice import STANDING, QueueOrder

log = logging.getLogger(__name__)

ACK_WAIT_S = 8.0
TOUCH_EVERY_S = 2.0
_UNBOUNDED = -1  # the credits are the bound
_ALWAYS = (STANDING, QueueKind(Priority.NORMAL, is_sync=False))
_FIND_TICKS = 10  # doorbells tell of calls in the other queues; one that nobody heard is made up for


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
        clock: Clock,
    ) -> None:
        self._bus = bus
        self._revision = revision
        self._room = room
        self._capacity = capacity
        self._take = take
        self._clock = clock
        self._order = QueueOrder()
        self._polling = 0
        self._offer_is_due = False
        self._loop = asyncio.get_running_loop()
        self._standing: Pull | None = None
        self._polled: dict[QueueKind, Pull] = {}
        self.ledgers: defaultdict[QueueKind, Ledger] = defaultdict(Ledger)  # what was handed over here, by its queue
        self._is_closed = False
        self._ticks = 0
        self._tasks = Tasks(f"queues of {revision}")

    def open(self) -> None:
        """Start to pull, once the queues' consumers exist; until then nothing is taken."""
        self._tasks.start(self._open())

    async def _open(self) -> None:
        try:
            stored, _ = await asyncio.gather(self._stored(), self._ensure_consumers(_ALWAYS))
            others = [kind for kind in stored if kind not in _ALWAYS]
            await self._ensure_consumers(others)
        except GpufnError as error:
            log.warning("the queues of %s cannot be pulled from yet: %s", self._revision, error)
            return  # `tick` comes back here
        if self._standing is not None or self._is_closed:
            return
        self._polled = {kind: self._pull(kind) for kind in (*_ALWAYS, *others)}
        self._standing = self._polled.pop(STANDING)
        self._offer()
        self.look()
        await self._find()  # what was rung for meanwhile

    async def _stored(self) -> Counter[QueueKind]:
        return await queue_position.stored(self._bus, self._revision.function, self._revision.number)

    async def _find(self) -> None:
        """Open the queues that calls are in."""
        try:
            stored = await self._stored()
        except GpufnError as error:
            log.info("whether calls of other classes wait for %s is not known: %s", self._revision, error)
            return  # `tick` comes back here
        for kind in stored:
            await self._open_too(kind)

    async def _open_too(self, kind: QueueKind) -> None:
        """A queue of a class that few functions have calls of."""
        if kind in self._polled or kind == STANDING or self._standing is None:
            return
        try:
            await self._ensure_consumers((kind,))
        except GpufnError as error:
            log.warning("the queue %s of %s cannot be polled yet: %s", kind, self._revision, error)
            return  # `tick` comes back here
        if kind not in self._polled and not self._is_closed:
            self._polled[kind] = self._pull(kind)
            self.on_doorbell(kind)

    def _pull(self, kind: QueueKind) -> Pull:
        queue = self._address(kind)
        return Pull(
            self._bus, queue.stream, queue.consumer, functools.partial(self._on_delivery, kind),
            ledger=self.ledgers[kind], on_empty=functools.partial(self._on_empty, kind), on_missing=self._on_missing,
        )  # fmt: skip

    def close(self) -> None:
        self._is_closed = True
        for pull in self._pulls():
            pull.withdraw()
        self._standing = None
        self._polled.clear()

    def offer(self) -> None:
        """Slots became free. Those of one turn of the loop are offered together, after what the turn writes."""
        if not self._offer_is_due:
            self._offer_is_due = True
            self._loop.call_soon(self._offer)

    def _offer(self) -> None:
        """Turn the room that no queue knows of into credits.

        A request for one credit costs the server as much as one for many. So while there is much room, and so credit,
        what becomes free is saved up until it is a quarter of all.
        """
        self._offer_is_due = False
        if self._standing is None:
            return
        now = self._clock.time()
        free = self._room() - self._polling
        while free > 0 and (queue := self._order.next(now)) is not None and queue != STANDING:
            self._poll(queue)  # also with what stands for nothing, while nobody is known to wait there
            free -= 1
        room = free - self._standing.credits
        if room > 0:
            capacity = self._capacity()
            if 4 * room >= capacity or 2 * self._standing.credits < capacity:
                self._standing.grant(room)
        self._look_out()

    def others_wait(self, priority: Priority) -> bool:
        """Calls of this class or a higher one are known to be in a queue: who comes past them has to get in line."""
        return self._order.others_wait(priority)

    def shrink(self) -> None:
        """Room is gone: take the credits for it back, or each would bring a delivery that nobody can run."""
        if self._standing is not None:
            self._standing.limit(max(self._room() - self._polling, int(self._order.could_overtake_callers())))

    def handed_back(self, message: InvocationMessage) -> None:
        """A delivery found no room: it waits in its queue again, where no delivery's `pending` counts it."""
        self._order.handed_back(message.queue, message.submitted_at)

    def on_doorbell(self, queue: QueueKind) -> None:
        """A call was queued there."""
        if queue in self._polled:
            self._order.waits(queue, self._clock.time())
            self._poll_highest()
            self._look_out()
        else:
            self._tasks.start(self._open_too(queue))

    def look(self) -> None:
        """Calls may wait in the polled queues: a doorbell may have been missed."""
        now = self._clock.time()
        for queue in self._polled:
            self._order.may_wait(queue, now)
        self._poll_highest()

    def tick(self, now: float) -> None:
        """Each second: the pulls' watchdogs, and a look at the polled queues; now and then for others to be polled."""
        self._ticks += 1
        if self._standing is None:
            self.open()
        elif self._ticks % _FIND_TICKS == 0:
            self._tasks.start(self._find())
        for pull in self._pulls():
            pull.tick(now)
        if self._standing is not None and self._standing.credits:
            self._order.is_empty(STANDING)  # what waited there has been taken, or is gone
        self.look()

    # --- from the pulls -----------------------------------------------------------------------------------------------

    def _look_out(self) -> None:
        """A caller who comes while no slot is free must not be overtaken by those whom he goes before. Nothing would
        tell of him; so one credit stands all the same, and what comes for it is handed back."""
        if self._standing is not None and not self._standing.credits and self._order.could_overtake_callers():
            self._standing.grant(1)

    def _poll_highest(self) -> None:
        if not self._polling and self._room() > 0 and (queue := self._order.to_poll()) is not None:
            self._poll(queue)

    def _poll(self, queue: QueueKind, credits: int = 1) -> None:  # noqa: A002
        pull = self._polled.get(queue)
        if pull is not None and credits > 0:
            self._polling += credits
            pull.poll(credits)

    def _on_empty(self, queue: QueueKind, unused: int) -> None:
        self._polling -= unused
        self._order.is_empty(queue)
        self._offer()
        self._poll_highest()

    def _on_delivery(self, queue: QueueKind, delivery: Delivery) -> None:
        self._order.delivered(queue, delivery.stored_at, delivery.pending, again=delivery.delivered > 1)
        if queue == STANDING:
            self._take(delivery)
            self._look_out()
            return
        self._polling -= 1
        self._take(delivery)
        if self._order.to_poll() is not None:
            self._offer()

    # --- consumers ----------------------------------------------------------------------------------------------------

    def _on_missing(self) -> None:
        self._tasks.start(self._recreate())

    async def _recreate(self) -> None:
        """SYNC is in the server's memory: after a restart a gateway creates the stream, then a runner its consumers."""
        try:
            await self._ensure_consumers((STANDING, *self._polled))
        except GpufnError as error:
            log.warning("the queues of %s cannot be pulled from yet: %s", self._revision, error)
            return  # each tick of the Pull comes back here
        for pull in self._pulls():
            pull.retry()

    async def _ensure_consumers(self, kinds: Iterable[QueueKind]) -> None:
        await asyncio.gather(
            *(
                streams.ensure_consumer(
                    self._bus, queue.stream, queue.consumer, queue.subject,
                    ack_wait_s=ACK_WAIT_S, max_ack_pending=_UNBOUNDED,
                )
                for queue in map(self._address, kinds)
            )
        )  # fmt: skip

    def _address(self, kind: QueueKind) -> queue_position.Address:
        return queue_position.address(self._revision.function, self._revision.number, kind)

    def _pulls(self) -> list[Pull]:
        return [] if self._standing is None else [self._standing, *self._polled.values()]
