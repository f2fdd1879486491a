"""A wait is cancelled by another thread, over HTTP too."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from gpufn import Client
from gpufn.call.cancellable_wait import CancelScope, wake_on_cancel
from gpufn_core.errors import GatewayUnavailable

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n1"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        yield listener


@pytest.fixture
def client(listener: socket.socket) -> Iterator[Client]:
    with Client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
        yield client


def test_current_and_later_waits_are_woken_and_ended_waits_are_not() -> None:
    woken: list[str] = []

    def waits() -> None:
        for name in ("before", "as it waits", "later"):
            with wake_on_cancel(lambda name=name: woken.append(name)):  # type: ignore[misc]
                if name == "as it waits":
                    scope.cancel()

    scope = CancelScope()
    scope.run(waits)
    scope.cancel()
    assert woken == ["as it waits", "later"]


def test_cancelling_a_call_over_http_shuts_its_connection(listener: socket.socket, client: Client) -> None:
    scope, raised = CancelScope(), []

    def call() -> None:
        try:
            scope.run(client.invoke_raw, "f", b"{}")
        except GatewayUnavailable as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(30)
        assert connection.recv(65_536).startswith(b"POST /v1/functions/f/invoke")
        scope.cancel()
        while connection.recv(65_536):
            pass
    thread.join(30)
    assert [type(error).__name__ for error in raised] == ["GatewayUnavailable"]


def test_a_call_that_was_cancelled_before_it_began_is_not_sent(listener: socket.socket, client: Client) -> None:
    scope = CancelScope()
    scope.cancel()
    with pytest.raises(GatewayUnavailable):
        scope.run(client.invoke_raw, "f", b"{}")
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(30)
        assert connection.recv(65_536) == b""


def test_cancelling_after_the_answer_keeps_the_connection_for_the_next_call(
    listener: socket.socket, client: Client
) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30)
            for _ in range(2):
                request = b""
                while not request.endswith(b"{}") and (data := connection.recv(65_536)):  # may come in parts
                    request += data
                connection.sendall(_ANSWER)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    scope = CancelScope()
    answers = [scope.run(client.invoke_raw, "f", b"{}").body]
    scope.cancel()
    answers.append(client.invoke_raw("f", b"{}").body)
    thread.join(30)
    assert answers == [b"1", b"1"]
