"""Delivery of webhooks by a gateway of a test, in the forms of the protocols."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gpufn_gateway.webhooks.deliveries import Deliveries
from tests.gateway.whole import Whole


@contextlib.asynccontextmanager
async def delivering(gateway: Whole) -> AsyncIterator[None]:
    deliveries = Deliveries(
        gateway.bus, gateway.webhook_secrets, gateway.post, gateway.clock, gateway.telemetry,
        payloads=gateway.protocols.webhook_payloads(),
    )  # fmt: skip
    task = asyncio.create_task(deliveries.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
