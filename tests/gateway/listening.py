"""An ASGI application behind the gateway's HTTP protocol or its server, on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator
from typing import Any, cast

import uvicorn

from gpufn_gateway.graceful_shutdown import GracefulShutdown
from gpufn_gateway.http.connection import server as gateway
from gpufn_gateway.http.connection.certificate import Certificate
from gpufn_gateway.http.connection.connection_limit import ConnectionLimit
from gpufn_gateway.http.connection.http2_tunnel import Http2
from gpufn_gateway.http.connection.uvicorn_protocol import GuardedProtocol
from gpufn_gateway.settings import GatewaySettings
from tests.waiting import until_async


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def serving(
    app: Any, limit: ConnectionLimit | None = None, tls: ssl.SSLContext | None = None, http2: Http2 | None = None
) -> AsyncIterator[tuple[Server, int]]:
    """Run a server; yield it and its port."""
    http: Any = functools.partial(GuardedProtocol, limit=limit, http2=http2)
    config = uvicorn.Config(
        app, port=0, http=http, ws="none", lifespan="off", log_config=None, access_log=False,
        timeout_graceful_shutdown=1, ssl_context_factory=(lambda *_: tls) if tls else None,
    )  # fmt: skip
    server = Server(config)
    task = asyncio.create_task(server.serve())
    await until_async(lambda: server.started)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def gateway_serving(
    app: Any, certificate: Certificate | None = None
) -> AsyncIterator[tuple[gateway.Server, int]]:
    """Run the gateway's server; yield it and its port."""
    settings = GatewaySettings(port=0)
    with gateway.listen(settings) as listener:
        server = gateway.Server(app, settings, cast("GracefulShutdown", None), certificate)
        server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
        task = asyncio.create_task(server.serve([listener]))
        await until_async(lambda: server.started)
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task
