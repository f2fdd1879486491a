"""Who submits many rings often enough that none waits unheard, and no more."""

from __future__ import annotations

import asyncio
from typing import Any

from gpufn.bus import doorbells
from gpufn.priority import Priority, QueueKind
from gpufn.protocol import subjects

NORMAL = QueueKind(Priority.NORMAL, is_sync=False)
LOW = QueueKind(Priority.LOW, is_sync=False)


async def test_those_who_come_at_once_are_rung_for_at_once_and_at_the_end(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    heard: asyncio.Queue[tuple[str, QueueKind | None]] = asyncio.Queue()
    bus.subscribe(
        subjects.DOORBELLS, lambda message: heard.put_nowait((message.subject, doorbells.queue_of(message.payload)))
    )
    ringer = doorbells.Ringer(bus)
    for _ in range(100):
        ringer.ring("f", NORMAL)
    ringer.ring("f", LOW)
    ringer.ring("g", NORMAL)
    f, g = subjects.doorbell("f"), subjects.doorbell("g")
    assert [await heard.get() for _ in range(4)] == [(f, NORMAL), (f, LOW), (g, NORMAL), (f, NORMAL)]
    doorbells.ring(bus, "end", NORMAL)
    assert await heard.get() == (subjects.doorbell("end"), NORMAL)
