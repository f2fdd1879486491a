"""The parser of WebSockets takes turns with the other connections, and a refusal is no error."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn

from gpufn_gateway.http.connection.websocket import OPTIONS, WebSocketConnection

HEAD = (
    b"GET /web/a/b/c/ HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
TINY = b"\x81\x81\0\0\0\0x"  # a masked text of one letter
COUNT = 5000


class Transport:
    """The output is discarded. `is_reading` is what the protocol has asked for."""

    def __init__(self) -> None:
        self.is_reading = True

    def __getattr__(self, name: str) -> Any:
        return Mock(return_value=False)

    def get_extra_info(self, name: str) -> Any:
        return None

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


def connection(app: Any) -> tuple[WebSocketConnection, Any, set[asyncio.Task[None]]]:
    config = uvicorn.Config(app, ws="none", log_config=None, **OPTIONS)
    config.load()
    state: Any = Mock(connections=set(), tasks=set(), default_headers=[])
    protocol = WebSocketConnection(config=config, server_state=state, app_state={}, release=Mock())
    transport: Any = Transport()
    protocol.connection_made(transport)
    return protocol, transport, state.tasks


async def test_short_messages_of_one_read_are_parsed_in_parts_and_all_arrive() -> None:
    """Bug: 37,000 messages in one read stopped the gateway for seconds."""
    received: list[str] = []
    in_queue: list[int] = []
    all_arrived = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            received.append(message["text"])
            in_queue.append(protocol.queue.qsize())
            if len(received) == COUNT + 1:
                all_arrived.set()

    protocol, transport, tasks = connection(app)
    protocol.data_received(HEAD)
    protocol.data_received(TINY * COUNT)
    assert not transport.is_reading, "until all of it is parsed"
    await asyncio.sleep(0)
    large = b"\x81\xfe\x27\x10\0\0\0\0" + b"y" * 10_000  # in several parts, none of which ends a message
    protocol.data_received(large)
    async with asyncio.timeout(30):
        await all_arrived.wait()
    assert received == ["x"] * COUNT + ["y" * 10_000]
    assert max(in_queue) < COUNT / 10
    assert transport.is_reading
    protocol.connection_lost(None)
    await asyncio.gather(*tasks)


async def test_a_refused_websocket_is_no_error_of_the_gateway(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"{}"})

    protocol, _, tasks = connection(app)
    protocol.data_received(HEAD)
    await asyncio.gather(*tasks)
    protocol.connection_lost(None)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
