"""The lifespan of an ASGI application: startup before the worker is ready, shutdown before it ends."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any


class Lifespan:
    """An application that ends or raises without a response to its startup has no lifespan, which is no error."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.state: dict[str, Any] = {}  # shared with the scopes of requests
        self._to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._responses: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._running: asyncio.Task[None] | None = None
        self._has_started = False

    async def start(self) -> None:
        """Raises RuntimeError if the application reports that its startup failed."""
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        self._running = asyncio.create_task(self._app(scope, self._to_app.get, self._responses.put))
        await self._exchange("startup")

    async def stop(self) -> None:
        if self._has_started:
            await self._exchange("shutdown")

    async def _exchange(self, phase: str) -> None:
        assert self._running is not None
        self._to_app.put_nowait({"type": f"lifespan.{phase}"})
        response = asyncio.ensure_future(self._responses.get())
        await asyncio.wait([response, self._running], return_when=asyncio.FIRST_COMPLETED)
        if not response.done():
            response.cancel()
            if not self._running.cancelled():
                self._running.exception()  # marks it as retrieved
            return
        answer = response.result()
        if answer["type"] == f"lifespan.{phase}.failed":
            raise RuntimeError(f"the application's {phase} failed: {answer.get('message', '')}")
        self._has_started = phase == "startup"
