"""Takes submitted calls out of a queue as a runner does, without being one."""

from __future__ import annotations

import asyncio

from gpufn.bus import queues, streams
from gpufn.bus.connection import Bus
from gpufn.bus.consumer import Pull
from gpufn.bus.delivery import Delivery
from gpufn.priority import Priority, QueueKind


async def take(bus: Bus, function: str, calls: int = 1, *, is_sync: bool = False) -> list[Delivery]:
    """The next ones of its first revision, of class normal; they are not settled."""
    stream, consumer, subject = queues.address(function, 1, QueueKind(Priority.NORMAL, is_sync=is_sync))
    await streams.ensure_consumer(bus, stream, consumer, subject, ack_wait_s=60, max_ack_pending=-1)
    taken: asyncio.Queue[Delivery] = asyncio.Queue()
    pull = Pull(bus, stream, consumer, taken.put_nowait)
    pull.grant(calls)
    found = [await taken.get() for _ in range(calls)]
    pull.withdraw()
    return found
