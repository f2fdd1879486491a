"""TCP connections from the ranks of a gang to rank 0. Both sides prove that they know the gang's secret.

    rank → rank 0   32 random bytes
    rank 0 → rank   32 random bytes, and an HMAC of both
    rank → rank 0   an HMAC of both in the other order

Frames follow, as between a runner and a worker: to the other ranks, rank 0 is the runner. The kernel's keepalive
detects a node that is gone, even while user code holds the interpreter.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
from collections.abc import Iterator

from gpufn_core.domain.worker import Gang

_BYTES = 32
_HANDSHAKE_S = 5.0
_IDLE_S, _INTERVAL_S, _PROBES = 4, 2, 3  # a silent node is lost after ten seconds, as for the controller


def listen(gang: Gang) -> socket.socket:
    """Listen for the other ranks. Raises OSError."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    return socket.create_server(("", gang.port), family=family, dualstack_ipv6=is_dual, backlog=len(gang.ranks))


def dial(gang: Gang) -> socket.socket:
    """Connect to rank 0. Raises OSError."""
    connection = socket.create_connection((gang.address, gang.port), timeout=_HANDSHAKE_S)
    with _closed_on_error(connection):
        own = os.urandom(_BYTES)
        connection.sendall(own)
        reply = _receive(connection, 2 * _BYTES)
        other, proof = reply[:_BYTES], reply[_BYTES:]
        if not hmac.compare_digest(proof, _proof(gang, own, other)):
            raise ConnectionRefusedError("the program that listens there is not rank 0 of this gang")
        connection.sendall(_proof(gang, other, own))
        _prepare(connection)
    return connection


def accept(gang: Gang, connection: socket.socket) -> None:
    """Check that the peer belongs to the gang. Raises OSError, and closes the connection then."""
    with _closed_on_error(connection):
        connection.settimeout(_HANDSHAKE_S)
        other, own = _receive(connection, _BYTES), os.urandom(_BYTES)
        connection.sendall(own + _proof(gang, other, own))
        if not hmac.compare_digest(_receive(connection, _BYTES), _proof(gang, own, other)):
            raise ConnectionRefusedError("the peer is not a rank of this gang")
        _prepare(connection)


def _proof(gang: Gang, first: bytes, second: bytes) -> bytes:
    return hmac.digest(gang.secret.encode(), first + second, "sha256")


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        received += part
    return received


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    lost_ms = 1000 * (_IDLE_S + _INTERVAL_S * _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lost_ms)  # the same while data is sent


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
