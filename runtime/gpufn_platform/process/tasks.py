"""Background tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """A set of running tasks. `name` is the default name of a task. Exceptions are logged."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None], name: str = "") -> None:
        task = asyncio.get_running_loop().create_task(work, name=name or self._name)
        self._running.add(task)
        task.add_done_callback(self._on_done)

    async def done(self) -> None:
        """Wait until all tasks have ended, including tasks started meanwhile."""
        while self._running:
            await asyncio.wait(self._running)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()

    async def end(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        self.cancel()
        await self.done()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
