"""The address where other nodes reach this node. All nodes reach the bus, so it is the local address of that route."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

_NATS_PORT = 4222


def address_towards(nats_url: str) -> str:
    """Return this machine's address on the route to the first NATS server that has one; "" if none has.

    >>> address_towards("nats://agent:secret@127.0.0.1:4222")
    '127.0.0.1'
    """
    for server in map(urlsplit, map(str.strip, nats_url.split(","))):
        with contextlib.suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(
                server.hostname, server.port or _NATS_PORT, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a datagram socket sends nothing here
                return str(probe.getsockname()[0])
    return ""
