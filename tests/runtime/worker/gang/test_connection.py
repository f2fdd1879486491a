"""Rank 0 admits only ranks that know the secret of the gang, and they talk to no other program."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpufn_core.domain.worker import Gang, Rank
from gpufn_runtime.worker.gang import connection
from tests.runtime.worker.gang.test_gang import free_port


def meet(secrets: tuple[str, str]) -> tuple[socket.socket | OSError, socket.socket | OSError]:
    """Connect a rank to rank 0; returns both ends, or their errors."""
    zero, one = (Gang((Rank("w-0", "a"),), "127.0.0.1", 0, secret) for secret in secrets)
    port = free_port()
    zero, one = (Gang(gang.ranks, gang.address, port, gang.secret) for gang in (zero, one))
    with connection.listen(zero) as server, ThreadPoolExecutor() as pool:
        dialed = pool.submit(connection.dial, one)
        peer, _ = server.accept()
        accepted = pool.submit(connection.accept, zero, peer)
        error = accepted.exception()
        assert error is None or isinstance(error, OSError)
        dial_error = dialed.exception()
        assert dial_error is None or isinstance(dial_error, OSError)
        return error or peer, dial_error or dialed.result()


def test_ranks_with_the_same_secret_exchange_bytes() -> None:
    zero, one = meet(("same", "same"))
    assert isinstance(zero, socket.socket)
    assert isinstance(one, socket.socket)
    with zero, one:
        zero.sendall(b"x")
        assert one.recv(10) == b"x"
        assert all(end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for end in (zero, one))


def test_ranks_with_different_secrets_refuse_each_other() -> None:
    ends = meet(("one", "two"))
    assert all(isinstance(end, OSError) for end in ends), ends


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64)])
def test_a_stranger_receives_no_more_than_the_handshake(sent: bytes) -> None:
    gang = Gang((Rank("w-0", "a"),), "127.0.0.1", free_port(), "secret")
    with connection.listen(gang) as server, socket.create_connection(("127.0.0.1", gang.port)) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        peer, _ = server.accept()
        with pytest.raises(OSError, match="peer"):
            connection.accept(gang, peer)
        received = b""
        while part := stranger.recv(1024):
            received += part
    assert len(received) in (0, 64)
