"""The HTTP server: uvicorn on a socket of ours, which says where it listens and stops when we are told to."""

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

import uvicorn

from gpufn_gateway.app import App
from gpufn_gateway.http import uvicorn_protocol
from gpufn_gateway.http.connection_limit import ConnectionLimit
from gpufn_gateway.settings import GatewaySettings
from gpufn_gateway.stopping import Stopping
from gpufn_platform.process.settings import InvalidSetting


class Server(uvicorn.Server):
    """SIGTERM and SIGINT end it in order: it listens no more, and `stopping` ends what is under way. A second one
    hurries that, a third one ends it at once."""

    def __init__(self, app: App, settings: GatewaySettings, stopping: Stopping) -> None:
        limit = ConnectionLimit(settings.max_connections_per_address)
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(uvicorn_protocol.GuardedProtocol, limit=limit),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=65,
            )
        )
        self._stopping = stopping

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Without uvicorn's own hands on them: it would end the process before the rest is shut down."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        yield

    def sweep(self, now: float) -> None:
        """Hang up on clients that stall; `now` is the loop's time."""
        uvicorn_protocol.sweep(list(self.server_state.connections), now)

    async def announce(self, listener: socket.socket) -> None:
        """Say on stdout where it listens, once it does."""
        while not self.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.005)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        if ipaddress.ip_address(host).is_unspecified:
            shown = "127.0.0.1"
        sys.stdout.write(json.dumps({"event": "listening", "url": f"http://{shown}:{port}"}) + "\n")
        sys.stdout.flush()

    def _stop(self) -> None:
        if not self.should_exit:
            self.should_exit = True
            self._stopping.start(self.server_state.tasks)
        elif not self._stopping.hurry():
            self.force_exit = True


def listen(settings: GatewaySettings) -> socket.socket:
    """Raises InvalidSetting."""
    try:
        return socket.create_server(
            (settings.host, settings.port),
            family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
            backlog=2048,
        )
    except OSError as error:
        raise InvalidSetting(
            f"cannot listen on GPUFN_HOST={settings.host} GPUFN_PORT={settings.port}: {error.strerror}"
        ) from error
