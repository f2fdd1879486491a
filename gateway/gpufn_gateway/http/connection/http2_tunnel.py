"""HTTP/2 connections, which only gRPC clients open: their bytes go to the gRPC server of this process, and back.

The connection remains a connection of the gateway: it counts for its address, and TLS ends here. The gRPC server is
imported and started with the first such connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, MutableSet
from typing import Any, Final, Protocol

log = logging.getLogger(__name__)

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Http2Server(Protocol):
    """A server of HTTP/2 connections (`gpufn_gateway.oip.grpc.server.GrpcServer`)."""

    async def start(self) -> None: ...
    def connect(self, client: tuple[str, int]) -> tuple[socket.socket, str]: ...
    def disconnect(self, name: str) -> None: ...
    async def stop(self, grace_s: float) -> None: ...


class Http2:
    """The HTTP/2 connections of a gateway. `load` imports the server, in a thread, and returns its constructor.

    The server may take `grace_s` to stop.
    """

    def __init__(self, load: Callable[[], Callable[[], Http2Server]], grace_s: float) -> None:
        self._load = load
        self._grace_s = grace_s
        self._starting: asyncio.Task[Http2Server] | None = None
        self._stopping: asyncio.Task[None] | None = None

    def accept(
        self,
        transport: asyncio.Transport,
        received: bytes,
        client: tuple[str, int],
        connections: MutableSet[Any],
        on_lost: Callable[[], None],
    ) -> None:
        """Take over a connection that began with PREFACE. `connections` are the connections that shutdown waits for."""
        tunnel = _ClientEnd(transport, self, connections, on_lost)
        transport.set_protocol(tunnel)
        transport.pause_reading()
        connections.add(tunnel)
        tunnel.opening = asyncio.get_running_loop().create_task(tunnel.open(received, client), name="http2 tunnel")

    async def server(self) -> Http2Server:
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.get_running_loop().create_task(self._start(), name="gRPC server")
        return await asyncio.shield(self._starting)

    async def _start(self) -> Http2Server:
        server = (await asyncio.to_thread(self._load))()
        await server.start()
        return server

    def shutdown(self) -> None:
        """Begin the shutdown of the server: no new requests, and the connections close after the requests in flight."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(), name="gRPC server stops")

    async def close(self) -> None:
        """Stop the server if it runs."""
        if self._starting is not None:
            self.shutdown()
        if self._stopping is not None:
            await self._stopping

    async def _stop(self) -> None:
        try:
            server = await self.server()
        except Exception:  # it did not start
            return
        await server.stop(self._grace_s)


class _End(asyncio.Protocol):
    """One end of a tunnel. Data that it receives is written to `other`, and it stops reading while `other` is full."""

    transport: asyncio.Transport
    other: asyncio.Transport | None = None

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


class _ClientEnd(_End):
    """The end at the client, in the place of the HTTP/1.1 protocol."""

    opening: asyncio.Task[None]

    def __init__(
        self,
        transport: asyncio.Transport,
        http2: Http2,
        connections: MutableSet[Any],
        on_lost: Callable[[], None],
    ) -> None:
        self.transport = transport
        self._http2 = http2
        self._connections = connections
        self._on_lost = on_lost
        self._server: Http2Server | None = None
        self._name = ""
        self._is_lost = False

    async def open(self, received: bytes, client: tuple[str, int]) -> None:
        try:
            self._server = await self._http2.server()
            connected, self._name = self._server.connect(client)
            loop = asyncio.get_running_loop()
            _, server_end = await loop.create_unix_connection(lambda: _ServerEnd(self.transport), sock=connected)
        except Exception:
            log.exception("the gRPC server did not accept a connection")
            self.transport.close()
            return
        self.other = server_end.transport
        self.other.write(received)
        if self._is_lost:
            self.other.close()
            self._server.disconnect(self._name)
        else:
            self.transport.resume_reading()

    def shutdown(self) -> None:
        self._http2.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_lost = True
        if self._server is not None:
            self._server.disconnect(self._name)
        self._connections.discard(self)
        self._on_lost()


class _ServerEnd(_End):
    def __init__(self, client: asyncio.Transport) -> None:
        self.other = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
