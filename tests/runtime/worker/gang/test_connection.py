"""Rank 0 admits only ranks that know the secret of the gang, and they talk to no other program."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import cast

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
def test_a_stranger_receives_only_the_handshake(sent: bytes) -> None:
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


class Drip:
    """A stranger that sends one byte a second."""

    def __init__(self) -> None:
        self.now, self.timeout, self.is_closed = 0.0, 0.0, False

    def recv(self, size: int) -> bytes:
        self.now += min(1.0, self.timeout)
        if self.timeout < 1:
            raise TimeoutError
        return b"x"

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds

    def close(self) -> None:
        self.is_closed = True


def test_a_handshake_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    drip = Drip()
    monkeypatch.setattr("time.monotonic", lambda: drip.now)
    with pytest.raises(TimeoutError):
        connection.accept(Gang((Rank("w-0", "a"),), "127.0.0.1", 0, "secret"), cast("socket.socket", drip))
    assert drip.is_closed
    assert drip.now < 10


def test_a_node_is_reached_although_rank_0_has_not_started() -> None:
    assert connection.reaches(Gang((), "127.0.0.1", free_port(), "secret"))


def test_a_node_that_does_not_answer_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", time_out)
    assert not connection.reaches(Gang((), "192.0.2.1", 29400, "secret"), within_s=0.0)


def test_only_rank_0_ends_the_gang_at_once_when_the_other_side_reads_nothing() -> None:
    """Rank 0's code may hold the interpreter while another rank prints."""
    zero, one = meet(("same", "same"))
    assert isinstance(zero, socket.socket)
    assert isinstance(one, socket.socket)
    with zero, one:
        limits_ms = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in (zero, one)]
    assert limits_ms == [10_000, 60_000]
