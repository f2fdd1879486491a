"""Takes submitted calls out of a queue as a runner does, without being one."""

from __future__ import annotations

import asyncio

from gpufn_core.spec.priority import Priority, QueueKind
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.puller import Pull


async def take(
    bus: Bus, function: str, calls: int = 1, *, is_sync: bool = False, priority: Priority = Priority.NORMAL
) -> list[Delivery]:
    """Take the next deliveries of the first revision in one priority class, without settling them."""
    stream, consumer, subject = queue_position.address(function, 1, QueueKind(priority, is_sync=is_sync))
    await streams.ensure_consumer(bus, stream, consumer, subject, ack_wait_s=60, max_ack_pending=-1)
    taken: asyncio.Queue[Delivery] = asyncio.Queue()
    pull = Pull(bus, stream, consumer, taken.put_nowait)
    pull.grant(calls)
    found = [await taken.get() for _ in range(calls)]
    pull.withdraw()
    return found
