"""Pulls of one Revision's calls from NATS: a standing pull of the sync queue of class normal, and polls of the other
queues. Queues of the classes hi and low are opened when they get their first call: most functions have none, and the
server needs milliseconds to create a consumer.

Room for one call is one credit, and a credit is granted to one queue at a time (queue_choice.py decides which). There
are two exceptions. After a wakeup, or if calls are known to wait in a queue, it is polled although the standing pull
holds the credit. And fast-path calls take room whose credits are granted. The owner must handle deliveries without
room.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass

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
from gpufn_runtime.runner.core.machine import ACK_WAIT_S
from gpufn_runtime.runner.dispatch.queue_choice import STANDING, QueueOrder

log = logging.getLogger(__name__)

_UNLIMITED = -1  # the credits are the limit
_DEFAULT_QUEUES = (STANDING, QueueKind(Priority.NORMAL, is_sync=False))
_FIND_EVERY_TICKS = 10  # wakeups announce calls in other queues; this finds calls whose wakeup was lost


@dataclass(eq=False, repr=False)
class PullCredits:
    """Pulls of one revision. `room()` is the number of deliveries that may arrive now, and `capacity()` the number that
    may be here at once. `receive(delivery)` starts a delivery, or hands it back."""

    bus: Bus
    revision: Revision
    _: KW_ONLY
    room: Callable[[], int]
    capacity: Callable[[], int]
    receive: Callable[[Delivery], None]
    clock: Clock

    def __post_init__(self) -> None:
        self._order = QueueOrder()
        self._polls = 0
        self._is_offer_scheduled = False
        self._loop = asyncio.get_running_loop()
        self._standing: Pull | None = None
        self._polled: dict[QueueKind, Pull] = {}
        self.ledgers: defaultdict[QueueKind, Ledger] = defaultdict(Ledger)  # received deliveries, by queue
        self._is_closed = False
        self._ticks = 0
        self._tasks = Tasks(f"queues of {self.revision}")

    def open(self) -> None:
        """Start pulling once the queues' consumers exist."""
        self._tasks.start(self._open())

    async def _open(self) -> None:
        try:
            stored, _ = await asyncio.gather(self._stored(), self._ensure_consumers(_DEFAULT_QUEUES))
            others = [kind for kind in stored if kind not in _DEFAULT_QUEUES]
            await self._ensure_consumers(others)
        except GpufnError as error:
            log.warning("cannot pull from the queues of %s yet: %s", self.revision, error)
            return  # `tick` tries again
        if self._standing is not None or self._is_closed:
            return
        self._polled = {kind: self._pull(kind) for kind in (*_DEFAULT_QUEUES, *others)}
        self._standing = self._polled.pop(STANDING)
        self._offer()
        self.poll_all()
        await self._open_missing_queues()  # for wakeups received meanwhile

    async def _stored(self) -> Counter[QueueKind]:
        return await queue_position.stored(self.bus, self.revision.function, self.revision.number)

    async def _open_missing_queues(self) -> None:
        """Open queues that contain calls but are not open yet."""
        try:
            stored = await self._stored()
        except GpufnError as error:
            log.info("cannot find out whether calls of other classes wait for %s: %s", self.revision, error)
            return  # `tick` tries again
        for kind in stored:
            await self._open_queue(kind)

    async def _open_queue(self, kind: QueueKind) -> None:
        """Open a queue of a class that few functions use."""
        if kind in self._polled or kind == STANDING or self._standing is None:
            return
        try:
            await self._ensure_consumers((kind,))
        except GpufnError as error:
            log.warning("cannot poll the queue %s of %s yet: %s", kind, self.revision, error)
            return  # `tick` tries again
        if kind not in self._polled and not self._is_closed:
            self._polled[kind] = self._pull(kind)
            self.on_wakeup(kind)

    def _pull(self, kind: QueueKind) -> Pull:
        queue = self._address(kind)
        return Pull(
            self.bus, queue.stream, queue.consumer, functools.partial(self._on_delivery, kind),
            ledger=self.ledgers[kind], on_empty=functools.partial(self._on_empty, kind), on_missing=self._on_missing,
        )  # fmt: skip

    def close(self) -> None:
        self._is_closed = True
        for pull in self._pulls():
            pull.withdraw()
        self._standing = None
        self._polled.clear()

    def offer(self) -> None:
        """Offer free slots. Slots freed in one event loop iteration are offered together, after its writes."""
        if not self._is_offer_scheduled:
            self._is_offer_scheduled = True
            self._loop.call_soon(self._offer)

    def _offer(self) -> None:
        """Turn room that is not offered to any queue into credits.

        A request for one credit costs the server as much as a request for many. So while there is much room and much
        credit, new room is collected until it is a quarter of the capacity.
        """
        self._is_offer_scheduled = False
        if self._standing is None:
            return
        now = self.clock.time()
        free = self.room() - self._polls
        while free > 0 and (queue := self._order.next(now)) is not None and queue != STANDING:
            self._poll(queue)  # uses standing credits too, while no call is known to wait in the standing queue
            free -= 1
        room = free - self._standing.credits
        if room > 0:
            capacity = self.capacity()
            if 4 * room >= capacity or 2 * self._standing.credits < capacity:
                self._standing.grant(room)
        self._grant_probe_credit()

    def others_wait(self, priority: Priority) -> bool:
        """Return whether calls of this class or a higher one are known to be queued. A fast-path call must not pass
        them."""
        return self._order.others_wait(priority)

    def shrink(self) -> None:
        """Withdraw credits for room that no longer exists: each would bring a delivery that cannot run."""
        if self._standing is not None:
            self._standing.limit(max(self.room() - self._polls, int(self._order.could_overtake_callers())))

    def handed_back(self, message: InvocationMessage) -> None:
        """Record a handed-back delivery: it waits in its queue again, and no delivery's `pending` counts it."""
        self._order.handed_back(message.queue, message.submitted_at)

    def on_wakeup(self, queue: QueueKind) -> None:
        """Handle a wakeup: a call was queued."""
        if queue in self._polled:
            self._order.mark_waiting(queue, self.clock.time())
            self._poll_highest()
            self._grant_probe_credit()
        else:
            self._tasks.start(self._open_queue(queue))

    def poll_all(self) -> None:
        """Poll the polled queues: calls may wait there if a wakeup was missed."""
        now = self.clock.time()
        for queue in self._polled:
            self._order.mark_maybe_waiting(queue, now)
        self._poll_highest()

    def tick(self, now: float) -> None:
        """Run the pulls' watchdogs and poll; sometimes look for queues to open. Called each second."""
        self._ticks += 1
        if self._standing is None:
            self.open()
        elif self._ticks % _FIND_EVERY_TICKS == 0:
            self._tasks.start(self._open_missing_queues())
        for pull in self._pulls():
            pull.tick(now)
        if self._standing is not None and self._standing.credits:
            self._order.mark_empty(STANDING)  # calls that waited there have been delivered, or were removed
        self.poll_all()

    # --- from the pulls -----------------------------------------------------------------------------------------------

    def _grant_probe_credit(self) -> None:
        """Keep one credit for a new caller. Without a free slot nothing would announce the caller, and calls of a lower
        rank could overtake it. A delivery for this credit is handed back."""
        if self._standing is not None and not self._standing.credits and self._order.could_overtake_callers():
            self._standing.grant(1)

    def _poll_highest(self) -> None:
        if not self._polls and self.room() > 0 and (queue := self._order.to_poll()) is not None:
            self._poll(queue)

    def _poll(self, queue: QueueKind) -> None:
        if (pull := self._polled.get(queue)) is not None:
            self._polls += 1
            pull.poll(1)

    def _on_empty(self, queue: QueueKind, unused: int) -> None:
        self._polls -= unused
        self._order.mark_empty(queue)
        self._offer()
        self._poll_highest()

    def _on_delivery(self, queue: QueueKind, delivery: Delivery) -> None:
        self._order.delivered(queue, delivery.stored_at, delivery.pending, is_redelivered=delivery.delivered > 1)
        if queue == STANDING:
            self.receive(delivery)
            self._grant_probe_credit()
            return
        self._polls -= 1
        self.receive(delivery)
        if self._order.to_poll() is not None:
            self._offer()

    # --- consumers ----------------------------------------------------------------------------------------------------

    def _on_missing(self) -> None:
        self._tasks.start(self._recreate())

    async def _recreate(self) -> None:
        """Create the consumers again. SYNC is in the server's memory: after a restart a gateway creates the stream,
        then a runner the consumers."""
        try:
            await self._ensure_consumers((STANDING, *self._polled))
        except GpufnError as error:
            log.warning("cannot pull from the queues of %s yet: %s", self.revision, error)
            return  # each tick of the Pull comes back here
        for pull in self._pulls():
            pull.retry()

    async def _ensure_consumers(self, kinds: Iterable[QueueKind]) -> None:
        await asyncio.gather(
            *(
                streams.ensure_consumer(
                    self.bus, queue.stream, queue.consumer, queue.subject,
                    ack_wait_s=ACK_WAIT_S, max_ack_pending=_UNLIMITED,
                )
                for queue in map(self._address, kinds)
            )
        )  # fmt: skip

    def _address(self, kind: QueueKind) -> queue_position.Address:
        return queue_position.address(self.revision.function, self.revision.number, kind)

    def _pulls(self) -> list[Pull]:
        return [] if self._standing is None else [self._standing, *self._polled.values()]
