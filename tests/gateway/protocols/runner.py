"""A stand-in for a runner: it takes submitted calls from the real bus and ends them at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.messages import unpack_invocation
from gpufn_core.spec.priority import Priority
from gpufn_platform.queue import queued_calls
from gpufn_platform.queue.records import call_records
from tests.gateway.whole import Whole
from tests.taking import take


def texts(arguments: dict[str, Any]) -> Any:
    """Return the texts of a call. Raises ValueError for the text `bad`."""
    if arguments["texts"] == ["bad"]:
        raise ValueError("no such text")
    return arguments["texts"]


async def _end_calls(
    gateway: Whole, function: str, answer: Callable[[dict[str, Any]], Any], priority: Priority
) -> None:
    while True:
        (delivery,) = await take(gateway.bus, function, priority=priority)
        _, body = unpack_invocation(delivery.payload)
        found = await queued_calls.at(gateway.bus, delivery.seq)
        assert found is not None
        fields: dict[str, Any] = {"state": InvocationState.SUCCEEDED, "content_type": "application/json"}
        result = b""
        try:
            result = msgspec.json.encode(answer(msgspec.json.decode(body)))
        except ValueError as error:
            info = ErrorInfo("function_raised", str(error), error_type="ValueError")
            fields = {"state": InvocationState.FAILED, "error": info}
        record = msgspec.structs.replace(found, ended_at=1.0, queue_s=0.5, run_s=0.25, worker="w-1", **fields)
        await call_records.end(gateway.bus, record, result)
        delivery.ack()


@contextlib.asynccontextmanager
async def running(
    gateway: Whole,
    function: str,
    answer: Callable[[dict[str, Any]], Any] = texts,
    priority: Priority = Priority.NORMAL,
) -> AsyncIterator[None]:
    task = asyncio.create_task(_end_calls(gateway, function, answer, priority))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
