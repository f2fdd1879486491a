"""The limits of a terminal, which the gateway keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gpufn_core.errors import GpufnError, InvalidInput, Unauthorized, WorkerLost
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.streams import terminal, web_session
from gpufn_core.protocol.streams.terminal import Channel
from gpufn_core.protocol.streams.web_session import Close, Disconnect, MessagePart
from gpufn_gateway.terminals import connection as module
from gpufn_gateway.terminals.connection import Connection
from tests.waiting import until_async

STARTED = b'\x03{"worker":"w-1"}'
ENDED = b'\x03{"exit_code":7}'


class Pending:
    """A session whose worker sends the events that a test puts into `events`; None ends the session."""

    id = "a-session"

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent: list[tuple[Any, bytes]] = []
        self.has_begun = False
        self.error: GpufnError | None = None

    async def payloads(self) -> AsyncIterator[bytes]:
        while (event := await self.events.get()) is not None:
            self.has_begun = True
            yield event

    def output(self, *messages: bytes) -> None:
        for message in messages:
            self.events.put_nowait(pack(MessagePart(False, False), message))

    def send_now(self, payload: bytes) -> None:
        self.sent.append(web_session.unpack_up(payload))
        if isinstance(self.sent[-1][0], Disconnect):
            self.events.put_nowait(None)

    async def send(self, payload: bytes) -> None:
        self.send_now(payload)

    def interrupt(self, error: GpufnError) -> None:
        self.error = error
        self.events.put_nowait(None)

    def cancel(self) -> None:
        self.events.put_nowait(None)


class Client:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received: list[dict[str, Any]] = []

    def sends(self, *messages: bytes) -> None:
        for message in messages:
            self.messages.put_nowait({"type": "websocket.receive", "bytes": message})

    def leaves(self) -> None:
        self.messages.put_nowait({"type": "websocket.disconnect"})

    async def send(self, event: dict[str, Any]) -> None:
        self.received.append(event)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(module, "_CHECK_S", 0.001)
    return monkeypatch


def connected(check: Any = lambda: None) -> tuple[Connection, Any, Client]:
    pending: Any = Pending()
    client = Client()
    return Connection(pending, client.messages.get, client.send, check), pending, client  # type: ignore[arg-type]


async def test_messages_pass_in_both_directions_and_the_result_is_noted() -> None:
    connection, pending, client = connected()
    pending.output(STARTED, b"\x01out")
    running = asyncio.create_task(connection.run())
    await until_async(lambda: len(client.received) == 2)
    client.sends(b"\x00in")
    await until_async(lambda: bool(pending.sent))
    pending.output(ENDED)
    pending.events.put_nowait(pack(Close(1000)))
    pending.events.put_nowait(None)
    await running
    assert [event["bytes"] for event in client.received] == [STARTED, b"\x01out", ENDED]
    assert pending.sent == [(MessagePart(False, False), b"\x00in")]
    assert (connection.worker, connection.exit_code, connection.taken, connection.sent) == ("w-1", 7, 3, 4)


async def test_input_before_the_start_ends_the_session() -> None:
    connection, pending, client = connected()
    client.sends(b"\x00early")
    await connection.run()
    assert isinstance(pending.error, InvalidInput)


async def test_a_terminal_ends_with_the_key_that_opened_it(quick: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise Unauthorized

    connection, pending, _ = connected(check)
    pending.output(STARTED)
    await connection.run()
    assert isinstance(pending.error, Unauthorized)


async def test_an_idle_terminal_is_closed(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(module, "IDLE_S", 0.01)
    connection, pending, client = connected()
    pending.output(STARTED)
    await connection.run()
    *_, status, close = client.received
    assert status["bytes"][0] == Channel.STATUS
    assert msgspec.json.decode(status["bytes"][1:])["problem"]["code"] == "invocation_timed_out"
    assert close["type"] == "websocket.close"
    assert isinstance(pending.sent[-1][0], Disconnect)


async def test_a_worker_receives_signs_of_life_of_its_gateway(quick: pytest.MonkeyPatch) -> None:
    quick.setattr(terminal, "ALIVE_EVERY_S", 0.0)
    connection, pending, client = connected()
    pending.output(STARTED)
    running = asyncio.create_task(connection.run())
    await until_async(lambda: bool(pending.sent))
    assert pending.sent[0] == (MessagePart(False, False), b"")
    client.leaves()
    await running


async def test_a_client_that_leaves_ends_the_command_and_a_worker_that_does_not_end_is_lost(
    quick: pytest.MonkeyPatch,
) -> None:
    quick.setattr(module, "_END_S", 0.0)
    connection, pending, client = connected()
    quick.setattr(pending, "send_now", pending.sent.append)  # the worker does not end
    pending.output(STARTED)
    running = asyncio.create_task(connection.run())
    await until_async(lambda: bool(client.received))
    client.leaves()
    await running
    assert connection.is_left
    assert pending.sent
    assert isinstance(pending.error, WorkerLost)


async def test_output_above_the_limit_waits(quick: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    connection, pending, client = connected()
    pending.output(STARTED, *([b"\x01" + bytes(1 << 20)] * 5), ENDED)
    pending.events.put_nowait(None)
    quick.setattr(connection, "_watch", client.messages.get)
    quick.setattr(asyncio, "sleep", sleep)
    await connection.run()
    assert len(client.received) == 7
    assert 2.5 < max(slept) < 3.5  # the limit is 1 MiB per second, after two seconds
