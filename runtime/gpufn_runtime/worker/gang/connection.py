"""TCP connections from the ranks of a gang to rank 0. Both sides prove that they know the gang's secret.

    rank → rank 0   32 random bytes
    rank 0 → rank   32 random bytes, and an HMAC of both
    rank → rank 0   an HMAC of both in the other order

Frames follow, as between a runner and a worker: to the other ranks, rank 0 is the runner. The kernel's keepalive
detects a lost node, even while user code holds the interpreter. While sent data is unacknowledged, keepalive rests and
TCP_USER_TIMEOUT is the limit. That limit also ends a connection to a live process that does not read.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from collections.abc import Iterator

from gpufn_core.domain.worker import Gang

_BYTES = 32
_HANDSHAKE_S = 5.0
_ARRIVED_S = 0.01
_REACHABLE_WITHIN_S = 60.0
_RETRY_S = 0.5
_IDLE_S, _INTERVAL_S, _PROBES = 4, 2, 3  # a silent node is lost after ten seconds, as for the controller
_LOST_S = _IDLE_S + _INTERVAL_S * _PROBES
_UNREAD_S = 60.0  # rank 0 reads no output of the other ranks while its code holds the interpreter


def listen(gang: Gang) -> socket.socket:
    """Listen for the other ranks. Raises OSError."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    socket.create_server(("", gang.master_port), family=family, dualstack_ipv6=is_dual).close()  # it must be free
    return socket.create_server(("", gang.port), family=family, dualstack_ipv6=is_dual)


def reaches(gang: Gang, within_s: float = _REACHABLE_WITHIN_S) -> bool:
    """Return whether packets reach the node of rank 0. It may refuse a connection, because rank 0 starts later."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection((gang.address, gang.port), timeout=_HANDSHAKE_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY_S)
        else:
            return True


def dial(gang: Gang) -> socket.socket:
    """Connect to rank 0. Raises OSError."""
    deadline = time.monotonic() + _HANDSHAKE_S
    connection = socket.create_connection((gang.address, gang.port), timeout=_HANDSHAKE_S)
    with _closed_on_error(connection):
        own = os.urandom(_BYTES)
        connection.sendall(own)
        reply = _receive(connection, 2 * _BYTES, deadline)
        other, proof = reply[:_BYTES], reply[_BYTES:]
        if not hmac.compare_digest(proof, _proof(gang, own, other)):
            raise ConnectionRefusedError("the program that listens there is not rank 0 of this gang")
        connection.sendall(_proof(gang, other, own))
        _prepare(connection, _UNREAD_S)
    return connection


def accept(gang: Gang, connection: socket.socket) -> None:
    """Check that the peer belongs to the gang. Raises OSError, and closes the connection then."""
    deadline = time.monotonic() + _HANDSHAKE_S
    with _closed_on_error(connection):
        other, own = _receive(connection, _BYTES, deadline), os.urandom(_BYTES)
        connection.sendall(own + _proof(gang, other, own))
        if not hmac.compare_digest(_receive(connection, _BYTES, deadline), _proof(gang, own, other)):
            raise ConnectionRefusedError("the peer is not a rank of this gang")
        _prepare(connection, _LOST_S)


def _proof(gang: Gang, first: bytes, second: bytes) -> bytes:
    return hmac.digest(gang.secret.encode(), first + second, "sha256")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        # After the deadline, bytes that are here are read: this process may have been late, not the peer.
        connection.settimeout(max(deadline - time.monotonic(), _ARRIVED_S))
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the peer closed the connection")
        received += part
    return received


def _prepare(connection: socket.socket, unacknowledged_s: float) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unacknowledged_s))


@contextlib.contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
