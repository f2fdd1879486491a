"""Clients that send a request and do not read: the decision as a table, and over a real connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpufn_gateway.http.connection.slow_reader import UnreadOutput
from gpufn_gateway.http.connection.uvicorn_protocol import sweep
from tests.gateway.listening import Server, serving
from tests.waiting import until_async

LARGE = bytes(32 << 20)  # more than the kernel's buffers on both sides hold


@pytest.mark.parametrize(
    ("looks", "is_left"),
    [
        # (bytes in this process, in the kernel, time)
        ([(0, 0, 0), (0, 0, 1000)], False),
        ([(0, 900, 0), (0, 900, 1000)], False),  # the kernel holds small responses
        ([(500, 900, 0), (500, 900, 60)], False),
        ([(500, 900, 0), (500, 900, 61)], True),
        ([(500, 900, 0), (400, 900, 61)], False),
        ([(500, 900, 0), (500, 899, 61)], False),
        ([(500, 900, 0), (500, 899, 61), (500, 899, 122)], True),
        ([(500, 900, 0), (0, 0, 30), (500, 900, 61)], False),
    ],
)
def test_a_client_has_stopped_reading_when_the_same_bytes_wait_for_a_minute(
    looks: list[tuple[int, int, float]], is_left: bool
) -> None:
    unread = UnreadOutput()
    assert [unread.is_stalled(*look) for look in looks][-1] is is_left


class Answering:
    """An application that sends a large body; `ended` is set when all is sent or the client is gone."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(LARGE))]})
        await send({"type": "http.response.body", "body": LARGE, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self.ended.set()


@contextlib.asynccontextmanager
async def asking(app: Any) -> AsyncIterator[tuple[Server, asyncio.StreamReader]]:
    """A client that has sent a request and not read the response."""
    async with serving(app) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        connections = server.server_state.connections
        await until_async(lambda: any(each.transport.get_write_buffer_size() for each in connections))
        yield server, reader
        writer.close()


async def test_a_client_that_sends_requests_and_does_not_read_is_disconnected_with_its_pending_requests() -> None:
    app = Answering()
    async with asking(app) as (server, _):
        connections = server.server_state.connections
        for minutes in itertools.count():  # the kernel may accept some more at first
            if sweep(list(connections), minutes * 61.0):
                break
            await asyncio.sleep(0.001)
        await app.ended.wait()
        await until_async(lambda: not connections)


async def test_a_client_that_reads_is_served_to_the_end_even_if_it_is_slow() -> None:
    async with asking(Answering()) as (server, reader):
        await reader.readuntil(b"\r\n\r\n")
        connections, left = list(server.server_state.connections), len(LARGE)
        for minutes in itertools.count():
            assert sweep(connections, minutes * 61.0) == 0
            if not left:
                break
            left -= len(await reader.readexactly(min(left, 8 << 20)))
