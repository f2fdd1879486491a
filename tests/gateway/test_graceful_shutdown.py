"""Graceful shutdown: calls that clients wait for, and other requests."""

from __future__ import annotations

import asyncio

from gpufn_core.errors import GpufnError, PlatformStopping
from gpufn_gateway.graceful_shutdown import GracefulShutdown
from tests.waiting import until_async


class Calls:
    def __init__(self, pending: int) -> None:
        self.pending = pending
        self.looked = asyncio.Event()
        self.ended: list[GpufnError] = []

    def fail_unless_started(self, error: GpufnError) -> None:
        assert isinstance(error, PlatformStopping)
        self.looked.set()

    def fail_all(self, error: GpufnError) -> None:
        self.ended += [error] * self.pending
        self.pending = 0


async def wait_for_ever() -> None:
    await asyncio.Event().wait()


async def stopped(calls: Calls, grace_s: float, requests_timeout_s: float = 0.0) -> None:
    request = asyncio.create_task(wait_for_ever())
    stopping = GracefulShutdown(calls, grace_s=lambda: grace_s, requests_timeout_s=requests_timeout_s)
    stopping.start({request})
    await calls.looked.wait()
    if grace_s:
        assert stopping.end_grace_period()
        assert not stopping.end_grace_period()
    await asyncio.wait([request])
    assert request.cancelled()


async def test_callers_of_unfinished_calls_receive_a_retryable_error() -> None:
    calls = Calls(2)
    async with asyncio.timeout(30):
        await stopped(calls, 600.0)
    assert [error.info().retryable for error in calls.ended] == [True, True]


async def test_a_gateway_without_calls_stops_at_once() -> None:
    calls = Calls(0)
    stopping = GracefulShutdown(calls, grace_s=lambda: 600.0, requests_timeout_s=600.0)
    stopping.start(())
    await until_async(lambda: stopping.is_done)
    assert calls.ended == []
    assert not calls.looked.is_set()
