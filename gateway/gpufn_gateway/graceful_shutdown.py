"""Graceful shutdown of the requests in flight.

1. Calls that no runner has started fail at once with 503 `platform_stopping`, so that clients retry them.
2. Running calls may finish within the grace period. After it they fail with the same error.
3. Other requests, such as long polls for the result of a submitted call, are cancelled after their own timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

from gpufn_core.errors import GpufnError, PlatformStopping

log = logging.getLogger(__name__)

_POLL_S = 0.05
_UNSTARTED_POLL_S = 1.0  # repeated: a stopping node returns its calls to their queues, where no runner starts them
_RESPONSE_S = 2.0  # time to send the responses


class _Calls(Protocol):
    """The calls that clients wait for (`gpufn_platform.queue.caller.Caller`)."""

    @property
    def pending(self) -> int: ...
    def fail_unless_started(self, error: GpufnError) -> None: ...
    def fail_all(self, error: GpufnError) -> None: ...


class GracefulShutdown:
    def __init__(self, calls: _Calls, *, grace_s: Callable[[], float], requests_timeout_s: float) -> None:
        self._calls = calls
        self._grace_s = grace_s
        self._requests_timeout_s = requests_timeout_s
        self._grace_ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, requests: Collection[asyncio.Task[Any]]) -> None:
        """Start the shutdown. `requests` is the live collection of request tasks in flight."""
        self._task = asyncio.get_running_loop().create_task(self._stop(requests), name="stopping")

    @property
    def is_done(self) -> bool:
        return self._task is not None and self._task.done()

    def end_grace_period(self) -> bool:
        """End the grace period now. False if it had ended already."""
        was_set = self._grace_ended.is_set()
        self._grace_ended.set()
        return not was_set

    async def _stop(self, requests: Collection[asyncio.Task[Any]]) -> None:
        started_at = asyncio.get_running_loop().time()
        error = PlatformStopping("the platform is shutting down; retry this call later")
        await self._wait_for_calls(started_at + self._grace_s(), error)
        if self._calls.pending:
            log.info("%d calls did not finish within the grace period", self._calls.pending)
        self._calls.fail_all(error)
        cut_off_at = max(started_at + self._requests_timeout_s, asyncio.get_running_loop().time() + _RESPONSE_S)
        remaining_s = cut_off_at - asyncio.get_running_loop().time()
        if requests and not self._grace_ended.is_set():
            await asyncio.wait(list(requests), timeout=remaining_s)
        for request in list(requests):
            request.cancel()

    async def _wait_for_calls(self, deadline: float, error: GpufnError) -> None:
        next_check_at = 0.0
        while (
            self._calls.pending
            and (now := asyncio.get_running_loop().time()) < deadline
            and not self._grace_ended.is_set()
        ):
            if now >= next_check_at:
                next_check_at = now + _UNSTARTED_POLL_S
                self._calls.fail_unless_started(error)
            await asyncio.sleep(_POLL_S)
