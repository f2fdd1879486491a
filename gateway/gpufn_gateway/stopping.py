"""What a gateway that stops does with requests under way.

1. calls that no runner has begun end at once: 503 `platform_stopping`, to be made again
2. calls that run may finish within the grace period; then the same error ends them
3. other requests, such as those that wait for the end of a submitted call, are cut off after a time of their own
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

from gpufn_core.errors import GpufnError, PlatformStopping

log = logging.getLogger(__name__)

_LOOK_S = 0.05
_BEGUN_LOOK_S = 1.0  # a node that stops hands calls back to their queues, where nobody begins them
_ANSWERED_S = 2.0  # clients have taken their answers by then


class _Calls(Protocol):
    """Those that clients wait for (`gpufn_platform.queue.caller.Caller`)."""

    @property
    def pending(self) -> int: ...
    def fail_unless_begun(self, error: GpufnError) -> None: ...
    def fail_all(self, error: GpufnError) -> None: ...


class Stopping:
    def __init__(self, calls: _Calls, *, grace_s: Callable[[], float], others_s: float) -> None:
        self._calls = calls
        self._grace_s = grace_s
        self._others_s = others_s
        self._hurry = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, requests: Collection[asyncio.Task[Any]]) -> None:
        """`requests` are those under way, as they come and go."""
        self._task = asyncio.get_running_loop().create_task(self._stop(requests), name="stopping")

    @property
    def is_over(self) -> bool:
        return self._task is not None and self._task.done()

    def hurry(self) -> bool:
        """End the grace period. False: it is over already."""
        was_set = self._hurry.is_set()
        self._hurry.set()
        return not was_set

    async def _stop(self, requests: Collection[asyncio.Task[Any]]) -> None:
        began = asyncio.get_running_loop().time()
        error = PlatformStopping("the platform stops; make this call again later")
        await self._calls_finish(began + self._grace_s(), error)
        if self._calls.pending:
            log.info("%d calls have not finished within the grace period", self._calls.pending)
        self._calls.fail_all(error)
        cut_off_at = max(began + self._others_s, asyncio.get_running_loop().time() + _ANSWERED_S)
        left_s = cut_off_at - asyncio.get_running_loop().time()
        if requests and not self._hurry.is_set():
            await asyncio.wait(list(requests), timeout=left_s)
        for request in list(requests):
            request.cancel()

    async def _calls_finish(self, until: float, error: GpufnError) -> None:
        look_at = 0.0
        while self._calls.pending and (now := asyncio.get_running_loop().time()) < until and not self._hurry.is_set():
            if now >= look_at:
                look_at = now + _BEGUN_LOOK_S
                self._calls.fail_unless_begun(error)
            await asyncio.sleep(_LOOK_S)
