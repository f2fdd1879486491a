"""Work that goes on beside whoever began it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """What was started and has not ended; `name` is that of each that has none of its own. A failure is logged, and
    nobody else's."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None], name: str = "") -> None:
        task = asyncio.get_running_loop().create_task(work, name=name or self._name)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def done(self) -> None:
        """Until none is left, later ones among them."""
        while self._running:
            await asyncio.wait(self._running)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    async def end(self) -> None:
        """Cancel them, and wait until they have ended."""
        self.cancel()
        await self.done()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
