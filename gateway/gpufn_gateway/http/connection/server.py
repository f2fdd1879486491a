"""The HTTP server: uvicorn on a socket that the gateway opens, with its own signal handling and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from gpufn_gateway.app import App
from gpufn_gateway.graceful_shutdown import GracefulShutdown
from gpufn_gateway.http.connection import uvicorn_protocol
from gpufn_gateway.http.connection.certificate import Certificate
from gpufn_gateway.http.connection.connection_limit import ConnectionLimit
from gpufn_gateway.http.connection.http2_tunnel import Http2
from gpufn_gateway.http.connection.minimum_rate import HEAD_S
from gpufn_gateway.http.connection.websocket import OPTIONS
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.process.settings import InvalidSetting

_BACKLOG: Final = 2048
_KEEP_ALIVE_S: Final = 65  # longer than proxies keep an idle connection, so that they close it first
_TLS_SHUTDOWN_S: Final = 60.0  # time for a slow client to read the rest; `sweep` ends the wait for its confirmation

# Responses have content of users, and no web page of another origin may load them.
_SECURITY_HEADERS: Final = [
    ("x-content-type-options", "nosniff"),
    ("cache-control", "no-store"),
    ("cross-origin-resource-policy", "same-origin"),
]


class Server(uvicorn.Server):
    """uvicorn with graceful shutdown on SIGTERM and SIGINT.

    The first signal stops listening, and `shutdown` finishes the requests in flight. A second signal ends the grace
    period, a third one exits at once.
    """

    def __init__(
        self,
        app: App,
        settings: GatewaySettings,
        shutdown: GracefulShutdown,
        certificate: Certificate | None,
        http2: Http2 | None = None,
    ) -> None:
        limit = ConnectionLimit(settings.max_connections_per_address)
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(uvicorn_protocol.GuardedProtocol, limit=limit, http2=http2),  # type: ignore[arg-type]
                ws="none",  # `uvicorn_protocol` upgrades connections itself
                **OPTIONS,
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                headers=_SECURITY_HEADERS,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._graceful_shutdown = shutdown
        self._certificate = certificate

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals here: uvicorn's own handlers would end the process before the rest is shut down."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`. uvicorn's own `startup` cannot limit the time of a TLS handshake."""
        assert sockets is not None
        self.servers = [await self._serve_on(each) for each in sockets]
        self.started = True

    async def _serve_on(self, listener: socket.socket) -> asyncio.Server:
        protocol: Any = self.config.http_protocol_class
        tls: dict[str, Any] = {}
        if self._certificate is not None:
            tls = {
                "ssl": self._certificate.context,
                "ssl_handshake_timeout": HEAD_S,
                "ssl_shutdown_timeout": _TLS_SHUTDOWN_S,
            }
        return await asyncio.get_running_loop().create_server(
            lambda: protocol(self.config, self.server_state, app_state={}), sock=listener, backlog=_BACKLOG, **tls
        )

    def tick(self, now: float) -> None:
        """Disconnect stalled clients, and use a new certificate. Call it about once a second with the loop's time."""
        uvicorn_protocol.sweep(list(self.server_state.connections), now)
        if self._certificate is not None:
            self._certificate.reload_if_changed()

    async def announce(self, listener: socket.socket) -> None:
        """Print the URL to stdout once the server listens."""
        while not self.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.005)
        host, port = listener.getsockname()[:2]
        displayed = f"[{host}]" if ":" in host else host
        if ipaddress.ip_address(host).is_unspecified:
            displayed = "127.0.0.1"
        scheme = "http" if self._certificate is None else "https"
        sys.stdout.write(json.dumps({"event": "listening", "url": f"{scheme}://{displayed}:{port}"}) + "\n")
        sys.stdout.flush()

    def _stop(self) -> None:
        if not self.should_exit:
            self.should_exit = True
            self._graceful_shutdown.start(self.server_state.tasks)
        elif not self._graceful_shutdown.end_grace_period():
            self.force_exit = True


def listen(settings: GatewaySettings) -> socket.socket:
    """Open the listening socket. Raises InvalidSetting if the address cannot be used."""
    try:
        return socket.create_server(
            (settings.host, settings.port),
            family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
            backlog=_BACKLOG,
        )
    except OSError as error:
        raise InvalidSetting(
            f"cannot listen on GPUFN_HOST={settings.host} GPUFN_PORT={settings.port}: {error.strerror}"
        ) from error
