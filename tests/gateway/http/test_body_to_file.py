"""Large bodies over real connections, with uvloop and with asyncio's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from gpufn_core.errors import CapacityError
from gpufn_gateway.http.body_reader import ClientDisconnected, write_body
from gpufn_gateway.http.connection.uvicorn_protocol import sweep
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES
from tests.gateway.listening import serving
from tests.waiting import until_async

BODY = bytes(range(256)) * (4 * MIN_SHARED_BYTES // 256)


class App:
    """An application that responds with the written body; a test may replace `write`."""

    def __init__(self) -> None:
        self.write: Callable[[bytes | memoryview], object] | None = None
        self.timeout_s: float | None = None
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
        self.disconnects = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        got = bytearray()
        try:
            async with asyncio.timeout(self.timeout_s):
                await write_body(receive, self.write or got.extend)
        except (ClientDisconnected, CapacityError, TimeoutError) as error:
            self.ended.put_nowait(error)
            got = bytearray(b"refused")
        else:
            self.ended.put_nowait(None)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(got))]})
        await send({"type": "http.response.body", "body": got})
        if scope["path"] == "/waits" and (await receive())["type"] == "http.disconnect":
            self.disconnects += 1


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, port: int) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def head(self, length: int, *lines: bytes, path: bytes = b"/") -> None:
        more = b"".join(line + b"\r\n" for line in lines)
        self.writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n" % (path, length, more))

    async def answer(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100"):
            return await self.answer()
        length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"content-length"))
        return await self.reader.readexactly(length)


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    return uvloop.run if request.param == "uvloop" else asyncio.run  # type: ignore[return-value]


def test_bodies_arrive_whole_one_after_the_other(run: Callable[[Awaitable[None]], None]) -> None:
    async def scene() -> None:
        async with serving(App()) as (_, port), Client.to(port) as client:
            for body in (BODY, b"small", BODY[: MIN_SHARED_BYTES + 1], BODY):
                client.head(len(body))
                client.writer.write(body)
                assert await client.answer() == body

    run(scene())


def test_simultaneous_requests_each_get_their_own_file(run: Callable[[Awaitable[None]], None]) -> None:
    async def scene() -> None:
        async with serving(App()) as (_, port), Client.to(port) as client:
            bodies = [BODY, b"small", BODY[1:], BODY]
            for body in bodies:
                client.head(len(body))
                client.writer.write(body)
            assert [await client.answer() for _ in bodies] == bodies

    run(scene())


def test_a_client_that_waits_for_100_continue_receives_it(run: Callable[[Awaitable[None]], None]) -> None:
    async def scene() -> None:
        async with serving(App()) as (_, port), Client.to(port) as client:
            client.head(len(BODY), b"expect: 100-continue")
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            client.writer.write(BODY)
            assert await client.answer() == BODY

    run(scene())


def test_a_client_that_leaves_midway_is_disconnected(run: Callable[[Awaitable[None]], None]) -> None:
    async def scene() -> None:
        app = App()
        reached = asyncio.Event()
        app.write = lambda part: reached.set()
        async with serving(app) as (_, port), Client.to(port) as client:
            client.head(len(BODY))
            client.writer.write(BODY[: 2 * MIN_SHARED_BYTES])
            await reached.wait()
            client.writer.transport.abort()
            assert isinstance(await app.ended.get(), ClientDisconnected)

    run(scene())


def test_a_body_that_cannot_be_kept_is_refused_and_ends_the_connection(
    run: Callable[[Awaitable[None]], None],
) -> None:
    async def scene() -> None:
        app = App()
        got = bytearray()

        def write(part: bytes | memoryview) -> None:
            got.extend(part)
            if len(got) > 2 * MIN_SHARED_BYTES:
                raise CapacityError("memory is full")

        app.write = write
        async with serving(app) as (_, port), Client.to(port) as client:
            client.head(len(BODY))
            client.writer.write(BODY)
            assert await client.answer() == b"refused"
            with contextlib.suppress(ConnectionError):
                assert await client.reader.read() == b""
            assert isinstance(await app.ended.get(), CapacityError)

    run(scene())


def test_a_body_that_takes_too_long_is_abandoned(run: Callable[[Awaitable[None]], None]) -> None:
    async def scene() -> None:
        app = App()
        app.timeout_s = 0.02
        async with serving(app) as (_, port), Client.to(port) as client:
            client.head(len(BODY))
            client.writer.write(BODY[:MIN_SHARED_BYTES])
            assert await client.answer() == b"refused"
            assert isinstance(await app.ended.get(), TimeoutError)
            assert await client.reader.read() == b""

    run(scene())


def test_a_stalled_client_is_disconnected(run: Callable[[Awaitable[None]], None]) -> None:
    async def scene() -> None:
        app = App()
        reached = asyncio.Event()
        app.write = lambda part: reached.set()
        async with serving(app) as (server, port), Client.to(port) as client:
            client.head(len(BODY))
            client.writer.write(BODY[: 2 * MIN_SHARED_BYTES])
            await reached.wait()
            now = asyncio.get_running_loop().time()
            assert [sweep(server.server_state.connections, now + each) for each in (0, 5, 15)] == [0, 0, 1]
            assert isinstance(await app.ended.get(), ClientDisconnected)

    run(scene())


def test_the_application_learns_later_that_the_client_left(run: Callable[[Awaitable[None]], None]) -> None:
    async def scene() -> None:
        app = App()
        async with serving(app) as (_, port), Client.to(port) as client:
            client.head(len(BODY), path=b"/waits")
            client.writer.write(BODY)
            assert await client.answer() == BODY
            client.writer.close()
            await until_async(lambda: app.disconnects)

    run(scene())
