"""An ASGI application behind the gateway's HTTP protocol, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from gpufn_gateway.http.connection_limit import ConnectionLimit
from gpufn_gateway.http.uvicorn_protocol import GuardedProtocol
from tests.waiting import until_async


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, limit: ConnectionLimit | None = None) -> AsyncIterator[tuple[Server, int]]:
    """Run a server; yield it and its port."""
    http: Any = GuardedProtocol if limit is None else functools.partial(GuardedProtocol, limit=limit)
    config = uvicorn.Config(
        app, port=0, http=http, ws="none", lifespan="off", log_config=None, access_log=False,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = Server(config)
    task = asyncio.create_task(server.serve())
    await until_async(lambda: server.started)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
