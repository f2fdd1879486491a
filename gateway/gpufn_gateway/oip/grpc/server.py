"""The gRPC server of a gateway. It listens on a unix socket; `http2_tunnel` connects it to the gateway's port."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path
from typing import Final

import grpc
from starlette.types import ASGIApp

from gpufn_gateway.auth.access import Access
from gpufn_gateway.oip.grpc.http_form import Address
from gpufn_gateway.oip.grpc.service import Service
from gpufn_gateway.settings import GatewaySettings

_STREAMS: Final = 64  # requests at a time on a connection
_READERS: Final = 16  # messages that are received at a time
_IDLE_S: Final = 300.0  # for a connection without requests; clients reconnect automatically
_PING_INTERVAL_S: Final = 60.0
_PING_TIMEOUT_S: Final = 20.0
_FRAMING_BYTES: Final = 64 << 10  # for the names, shapes and parameters around the tensors of a request
_UNKNOWN: Final = ("", 0)


class GrpcServer:
    def __init__(self, app: ASGIApp, access: Access, settings: GatewaySettings, path: Path) -> None:
        self._path = path
        self._numbers = itertools.count()
        self._addresses: dict[str, Address] = {}  # by the name of the client's end of the unix socket
        self._service = Service(app, access, self._address_of, readers=_READERS, timeout_s=settings.body_timeout_s)
        self._server = grpc.aio.server(
            handlers=(self._service,),
            options=(
                ("grpc.max_receive_message_length", settings.max_body_bytes + _FRAMING_BYTES),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", _STREAMS),
                ("grpc.max_metadata_size", 32 << 10),
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.max_connection_idle_ms", int(_IDLE_S * 1000)),
                # A client that does not read, or that disappeared without closing its connection, does not respond.
                ("grpc.keepalive_time_ms", int(_PING_INTERVAL_S * 1000)),
                ("grpc.keepalive_timeout_ms", int(_PING_TIMEOUT_S * 1000)),
            ),
        )

    @property
    def clients(self) -> int:
        """Connected clients."""
        return len(self._addresses)

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix:{self._path}")
        await self._server.start()

    def connect(self, client: Address) -> tuple[socket.socket, str]:
        """Return a connected socket for a client, and its name, which `disconnect` forgets."""
        name = f"gpufn-grpc-{os.getpid()}-{next(self._numbers)}"
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            end.bind(f"\0{name}")
            end.connect(os.fspath(self._path))
        except OSError:
            end.close()
            raise
        self._addresses[name] = client
        return end, name

    def disconnect(self, name: str) -> None:
        self._addresses.pop(name, None)

    async def stop(self, grace_s: float) -> None:
        """Finish the requests in flight, then close all connections."""
        self._service.stop()
        await self._server.stop(grace_s)
        self._path.unlink(missing_ok=True)

    def _address_of(self, peer: str) -> Address:
        return self._addresses.get(peer.rpartition(":")[2], _UNKNOWN)
