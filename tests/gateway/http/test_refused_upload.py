"""A refused upload reaches clients that write the whole body before they read."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import resource
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from gpufn_core.errors import PayloadTooLarge, Unauthorized
from gpufn_gateway.http.body_reader import BodyBudget, BodyReader, ClientDisconnected, Receive, Scope, Send
from gpufn_gateway.http.connection.uvicorn_protocol import sweep
from gpufn_gateway.http.responses import GPUFN_FORMAT, send_problem
from gpufn_gateway.problems import problem_of
from tests.gateway.listening import serving
from tests.waiting import until_async

LIMIT = 64 << 20
UPLOAD = bytes(80_000_000)


async def too_large(scope: Scope, receive: Receive, send: Send) -> None:
    reader = BodyReader(LIMIT, 30, what="a test", budget=BodyBudget(1 << 30))
    try:
        body = await reader.read(dict(scope["headers"]), receive)
    except PayloadTooLarge as error:
        await send_problem(send, GPUFN_FORMAT, problem_of(error))
    except ClientDisconnected:
        return
    else:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"%09d" % len(body)})


async def unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    await send_problem(send, GPUFN_FORMAT, problem_of(Unauthorized()))


def by_urllib(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", UPLOAD) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code if error.read().startswith(b'{"type":"about:blank"') else 0


def by_http_client(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        connection.request("POST", "/", UPLOAD)
        return connection.getresponse().status


def in_chunks(port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        connection.request("POST", "/", iter([UPLOAD[: 1 << 20]] * 80), encode_chunked=True)
        return connection.getresponse().status


def by_socket(port: int) -> int:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(UPLOAD))
        client.sendall(UPLOAD)
        return int(client.recv(1 << 16).split()[1])


def expecting_100(port: int) -> int:
    """A client may send its body without waiting for the 100."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
        client.sendall(head % len(UPLOAD))
        client.sendall(UPLOAD)
        return int(client.recv(1 << 16).split()[1])


@pytest.mark.parametrize("upload", [by_urllib, by_http_client, in_chunks, by_socket, expecting_100])
@pytest.mark.parametrize(("app", "status"), [(too_large, 413), (unauthorized, 401)])
async def test_a_client_that_writes_before_it_reads_gets_the_refusal(
    upload: Callable[[int], int], app: Any, status: int
) -> None:
    async with serving(app) as (_, port):
        assert await asyncio.to_thread(upload, port) == status


async def test_a_refused_upload_uses_no_memory() -> None:
    async with serving(too_large) as (_, port):
        await asyncio.to_thread(by_socket, port)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await asyncio.to_thread(by_socket, port)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10, "in KiB"


async def test_an_answer_in_place_of_100_continue_ends_the_connection() -> None:
    """The client may omit the body; its next request would then be read as the body."""
    async with serving(unauthorized) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 50\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in answer
        writer.close()


async def test_a_request_after_100_continue_keeps_its_connection() -> None:
    async with serving(too_large) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(b"abcde")
            assert b"connection: close" not in await reader.readuntil(b"000000005")
        writer.close()


async def test_a_refused_upload_without_end_is_cut_off() -> None:
    async with serving(too_large) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        connections = list[Any](server.server_state.connections)
        now = asyncio.get_running_loop().time()
        for second in range(0, 31, 2):
            writer.write(bytes(1 << 16))
            received = connections[0]._received
            await until_async(lambda: connections[0]._received != received)  # noqa: B023  it is awaited here
            assert sweep(connections, now + second) == 0
        assert sweep(connections, now + 31) == 1
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()


async def test_a_client_that_leaves_a_refused_upload_frees_its_connection() -> None:
    async with serving(too_large) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await until_async(lambda: not server.server_state.connections)
