"""The limits of the HTTP server, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpufn_gateway.http.body_reader import BodyBudget, BodyReader, ClientDisconnected
from gpufn_gateway.http.connection.connection_limit import ConnectionLimit
from gpufn_gateway.http.connection.uvicorn_protocol import MAX_HEAD_BYTES, sweep
from gpufn_gateway.problems import RouteError
from tests.gateway.listening import Server, serving
from tests.waiting import until_async


@contextlib.asynccontextmanager
async def reading() -> AsyncIterator[tuple[Server, int]]:
    """A server that reads bodies and responds with their size."""
    reader = BodyReader(1 << 20, 30, what="a test", budget=BodyBudget(1 << 30))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(ClientDisconnected):
            body = await reader.read(dict(scope["headers"]), receive)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
            await send({"type": "http.response.body", "body": b"%07d" % len(body)})

    async with serving(app) as served:
        yield served


def _moved(connection: Any, before: float) -> bool:
    return bool(connection._last_data > before)


async def connections(server: Server, count: int) -> list[Any]:
    await until_async(lambda: len(server.server_state.connections) >= count)
    return list(server.server_state.connections)


async def test_an_ordinary_request_is_served_in_any_number_of_pieces() -> None:
    async with reading() as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        (connection,) = await connections(server, 1)
        for piece in (b"POST / HT", b"TP/1.1\r\nhost: x\r\ncontent-", b"length: 4\r\n\r\nab", b"cd"):
            before = connection._last_data
            writer.write(piece)
            await until_async(functools.partial(_moved, connection, before))
        assert (await reader.readuntil(b"0000004")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\na")
        await reader.readuntil(b"0000001")
        assert not connection.has_stalled(asyncio.get_running_loop().time() + 1000), "keep-alive is uvicorn's"
        writer.close()


async def test_a_head_without_end_is_refused() -> None:
    async with reading() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1))
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b'"code":"bad_request"' in answer
        writer.close()


@pytest.mark.parametrize("earlier", [b"", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\na"])
async def test_a_large_head_in_one_burst_is_refused(earlier: bytes) -> None:
    async with reading() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(earlier + b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000 + b"\r\n\r\n")
        assert b"HTTP/1.1 431 Request Header Fields Too Large\r\n" in await reader.read()
        writer.close()


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"GET /\r\n\r\n", b"HTTP/0.9 is not supported"),
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", b"HTTP/2.0 is not supported"),
        (b"GET / HTTP/1.1\r\n\r\n", b"no Host field"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", b"several Host fields"),
        (b"GET / HTTP/1.1\r\nhost: [::1].evil.com\r\n\r\n", b"The Host field"),
        (b"GET / HTTP/1.1\r\nhost: localhost:80:evil\r\n\r\n", b"The Host field"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", b"not a valid"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", b"not a valid"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\n\r\n", b"not a valid"),
    ],
)
async def test_a_head_that_breaks_the_rules_is_a_problem(head: bytes, said: bytes) -> None:
    async with reading() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert said in answer
        writer.close()


async def test_a_refused_client_that_sends_single_bytes_is_disconnected() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = await connections(server, 1)
        now = asyncio.get_running_loop().time()
        swept = []
        for seconds in (0, 3, 6, 9, 12):
            received = connection._received
            writer.write(b"a")
            await until_async(lambda: connection._received > received)  # noqa: B023  it is awaited here
            swept.append(sweep([connection], now + seconds))
        assert swept == [0, 0, 0, 0, 1]
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_empty_lines_do_not_keep_a_connection() -> None:
    async with reading() as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        (connection,) = await connections(server, 1)
        writer.write(b"\r\n")
        await until_async(lambda: connection._received)
        assert sweep([connection], connection._connected_at + 31) == 1
        writer.close()


async def test_the_connections_of_an_address_are_limited() -> None:
    limit = ConnectionLimit(2)
    async with serving(_refuse_all, limit=limit) as (server, port):
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await connections(server, 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"GPUFN_MAX_CONNECTIONS_PER_ADDRESS" in answer
        writer.close()
        clients.pop()[1].close()
        await until_async(lambda: len(server.server_state.connections) == 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        for each in (writer, clients[0][1]):
            each.close()


async def _refuse_all(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"2"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})


async def test_stalled_clients_are_disconnected() -> None:
    async with reading() as (server, port):
        started = [b"", b"POST / HTTP/1.1\r\nhost:", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab"]
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in started]
        for (_, writer), piece in zip(clients, started, strict=True):
            writer.write(piece)
        known = await connections(server, len(started))
        await until_async(lambda: sum(each._phase.name != "BETWEEN" for each in known) == 2)
        now = asyncio.get_running_loop().time()
        assert [sweep(known, now + seconds) for seconds in (0, 5, 15)] == [0, 0, 2]
        assert sweep([each for each in known if not each.transport.is_closing()], now + 35) == 1
        for reader, writer in clients:
            assert await reader.read() == b""
            writer.close()


async def test_a_body_that_arrives_too_slowly_is_abandoned() -> None:
    reader = BodyReader(1 << 20, 0.001, what="a test", budget=BodyBudget(1 << 30))

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    messages = [{"type": "http.request", "body": b"a", "more_body": True}]
    with pytest.raises(RouteError, match=r"0\.001 s") as caught:
        await reader.read({}, receive)
    assert caught.value.status == 408


async def test_many_simultaneous_requests_are_all_served() -> None:
    """Each head is small, no matter how many a single read holds and where it splits one."""
    async with reading() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        count = 2 * MAX_HEAD_BYTES // 32
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\na" * count)
        for _ in range(count):
            assert (await reader.readuntil(b"0000001")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


@pytest.mark.parametrize("garbage", [b"\x16\x03\x01\x02 TLS\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"])
async def test_input_that_is_not_http_is_a_problem_too(garbage: bytes) -> None:
    async with reading() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b'"code":"bad_request"' in answer
        writer.close()


async def test_garbage_behind_a_request_breaks_off_its_answer_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with reading() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\na" + b"\x00 garbage\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request\r\n")
        writer.close()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_request_to_change_the_protocol_is_served_in_this_one() -> None:
    """Java's client requests h2c with its first request, and continues in HTTP/1.1 if the server does not upgrade."""
    async with reading() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAI\r\n"
        for headers in (upgrade, b"", upgrade):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\n" + headers + b"content-length: 3\r\n\r\nabc")
            assert (await reader.readuntil(b"0000003")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()


async def test_fields_behind_a_body_are_no_headers() -> None:
    """A proxy in front of the gateway checks the headers, but not the trailer fields."""
    seen: list[dict[bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await BodyReader(1 << 20, 30, what="a test", budget=BodyBudget(1 << 30)).read({}, receive)
        seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with serving(app) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nauthorization: me\r\n\r\n"
        )
        for _ in range(2):
            writer.write(request)
            await reader.readuntil(b"ok")
        writer.close()
    assert seen == [{b"host": b"x", b"transfer-encoding": b"chunked"}] * 2


@pytest.mark.parametrize(
    "endless", [b"0\r\n" + b"a:b\r\n" * 200_000, b"0\r\na: " + b"b" * 1_000_000, b"1;" + b"a" * 1_000_000]
)
async def test_framing_beside_a_body_may_be_as_large_as_a_head(endless: bytes) -> None:
    async with reading() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + endless)
        with contextlib.suppress(ConnectionError):  # the server closes while we keep writing
            assert (await reader.read()).startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert reader.at_eof() or reader.exception() is not None
        writer.close()


async def test_a_body_in_chunks_may_be_larger_than_a_head() -> None:
    async with reading() as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(50):
            writer.write(b"4000\r\n" + bytes(0x2000))
            writer.write(bytes(0x2000) + b"\r\n" + b"1\r\na\r\n" * 10)
        writer.write(b"0\r\n\r\n")
        await reader.readuntil(b"%07d" % (50 * (0x4000 + 10)))
        writer.close()


async def test_pipelined_requests_wait_with_their_client() -> None:
    """uvicorn resumes reading after each response, and a waiting request takes a hundred times its bytes."""
    waiting: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        waiting.append(max(len(each.pipeline) for each in list[Any](server.server_state.connections)))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    count, in_one_read = 400, (256 << 10) // 4096
    async with serving(app) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 4096 + b"\r\n\r\n") * count)
        for _ in range(count):
            await reader.readuntil(b"\r\n\r\nok")
        writer.close()
    assert len(waiting) == count
    assert max(waiting) < 2 * in_one_read


async def test_garbage_is_not_mixed_into_an_answer_that_has_begun() -> None:
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9999")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(app) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await begun.wait()
        await reader.readuntil(b"\r\n\r\nab")  # the request id may contain "ab" too
        writer.write(b"\x00 garbage\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
