from __future__ import annotations

import asyncio

import pytest

from gpufn_core.protocol import subjects
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.bus_setup import Storage
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.leader_lease import LeaderLease


def test_a_gateway_can_lead_on_a_bus_that_returned_empty(nats: EmbeddedServer) -> None:
    """The watchers of most buckets recreate them; the lease bucket has no watcher."""

    async def main() -> None:
        bus = await Bus.connect(nats.url, name="test")
        try:
            buckets = await Buckets.open(bus)
            storage = Storage(bus, buckets)
            await bus.js(f"STREAM.DELETE.KV_{subjects.LEASES}")
            await storage.ensure()
            assert await LeaderLease(buckets.leases, "controller", "a").try_acquire(0.0)
        finally:
            await bus.close()

    asyncio.run(main())


def test_a_defect_while_they_are_made_again_is_tried_again(
    nats: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        bus = await Bus.connect(nats.url, name="test")
        try:
            storage = Storage(bus, await Buckets.open(bus))
            ensure, failures = storage.ensure, [OSError(24, "Too many open files"), KeyError("config")]

            async def fails_at_first() -> None:
                if failures:
                    raise failures.pop()
                await ensure()

            monkeypatch.setattr(storage, "ensure", fails_at_first)
            await storage._recreate()
            assert storage.is_ready
        finally:
            await bus.close()

    asyncio.run(main())
