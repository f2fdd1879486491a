"""A stand-in for a runner: it takes submitted calls from the real bus and ends them at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.messages import unpack_invocation
from gpufn_platform.queue import call_records, queued_calls
from tests.gateway.whole import Whole
from tests.taking import take


async def _end_calls(gateway: Whole, function: str) -> None:
    """Return the texts of each call; fail for the text `bad`."""
    while True:
        (delivery,) = await take(gateway.bus, function)
        _, body = unpack_invocation(delivery.payload)
        texts = msgspec.json.decode(body)["texts"]
        found = await queued_calls.at(gateway.bus, delivery.seq)
        assert found is not None
        fields: dict[str, Any] = {"state": InvocationState.SUCCEEDED, "content_type": "application/json"}
        if texts == ["bad"]:
            error = ErrorInfo("function_raised", "no such text", error_type="ValueError")
            fields = {"state": InvocationState.FAILED, "error": error}
        record = msgspec.structs.replace(found, ended_at=1.0, queue_s=0.5, run_s=0.25, worker="w-1", **fields)
        await call_records.end(gateway.bus, record, b"" if "error" in fields else msgspec.json.encode(texts))
        delivery.ack()


@contextlib.asynccontextmanager
async def running(gateway: Whole, function: str) -> AsyncIterator[None]:
    task = asyncio.create_task(_end_calls(gateway, function))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
