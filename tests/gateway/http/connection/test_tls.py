"""The HTTP protocol over TLS, with uvloop and with asyncio's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest
import uvloop

from gpufn_gateway.http.body_reader import ClientDisconnected, write_body
from gpufn_gateway.http.connection import server as server_module
from gpufn_gateway.http.connection.certificate import Certificate
from gpufn_gateway.http.connection.server import Server
from gpufn_gateway.http.connection.uvicorn_protocol import MAX_HEAD_BYTES, sweep
from tests.certificates import Authority
from tests.gateway.http.test_refused_upload import UPLOAD, too_large
from tests.gateway.listening import gateway_serving, serving
from tests.waiting import until_async

BODY = bytes(range(256)) * (40 << 12)
Run = Callable[[Awaitable[Any]], Any]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return Certificate(*map(os.fspath, authority.issue("gateway")))


@pytest.fixture(scope="module")
def trust(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=os.fspath(authority.file))


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    return uvloop.run if request.param == "uvloop" else asyncio.run  # type: ignore[return-value]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = bytearray()
    with contextlib.suppress(ClientDisconnected):
        await write_body(receive, body.extend)
        headers = [(b"content-length", b"%d" % len(body)), (b"x-scheme", scope["scheme"].encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def connected(port: int, trust: ssl.SSLContext) -> Iterator[http.client.HTTPSConnection]:
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, context=trust)) as connection:
        yield connection


@contextlib.contextmanager
def raw(port: int, trust: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        yield connection


def test_bodies_of_all_sizes_share_a_connection(run: Run, certificate: Certificate, trust: ssl.SSLContext) -> None:
    def call(port: int) -> None:
        with connected(port, trust) as connection:
            for body in (b"small", BODY, b"", BODY[: 1 << 20], b"small"):
                connection.request("POST", "/", body)
                answer = connection.getresponse()
                assert (answer.status, answer.headers["x-scheme"], answer.read() == body) == (200, "https", True)

    async def main() -> None:
        async with serving(echo, tls=certificate.context) as (server, port):
            await asyncio.to_thread(call, port)
            await until_async(lambda: not server.server_state.connections)

    run(main())


def test_a_client_that_writes_before_it_reads_gets_the_refusal(
    run: Run, certificate: Certificate, trust: ssl.SSLContext
) -> None:
    def upload(port: int) -> int:
        with connected(port, trust) as connection:
            connection.request("POST", "/", UPLOAD)
            return connection.getresponse().status

    async def main() -> None:
        async with serving(too_large, tls=certificate.context) as (server, port):
            assert await asyncio.to_thread(upload, port) == 413
            await until_async(lambda: not server.server_state.connections)

    run(main())


def test_a_refused_upload_without_end_is_cut_off(run: Run, certificate: Certificate, trust: ssl.SSLContext) -> None:
    async def main() -> None:
        async with serving(too_large, tls=certificate.context) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
            (connection,) = list[Any](server.server_state.connections)
            now = asyncio.get_running_loop().time()
            assert [sweep([connection], now), sweep([connection], now + 31)] == [0, 1]
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            await until_async(lambda: not server.server_state.connections)

    run(main())


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD_BYTES + 1), b"431"),
    ],
)
def test_a_head_that_breaks_the_rules_is_refused(
    run: Run, certificate: Certificate, trust: ssl.SSLContext, head: bytes, status: bytes
) -> None:
    def send(port: int) -> bytes:
        with raw(port, trust) as connection:
            connection.sendall(head)
            return connection.recv(1 << 16).split()[1]

    async def main() -> None:
        async with serving(echo, tls=certificate.context) as (server, port):
            assert await asyncio.to_thread(send, port) == status
            await until_async(lambda: not server.server_state.connections)

    run(main())


def test_head_and_body_of_a_response_are_one_record(run: Run, certificate: Certificate, trust: ssl.SSLContext) -> None:
    def call(port: int) -> bytes:
        with raw(port, trust) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody")
            return connection.recv(1 << 16)  # one record

    async def main() -> None:
        async with serving(echo, tls=certificate.context) as (_, port):
            answer = await asyncio.to_thread(call, port)
            assert (answer.startswith(b"HTTP/1.1 200 "), answer.endswith(b"\r\n\r\nbody")) == (True, True)

    run(main())


def test_a_client_that_does_not_confirm_the_end_is_disconnected_once_it_has_the_response(
    run: Run, certificate: Certificate, trust: ssl.SSLContext
) -> None:
    async def main() -> None:
        async with gateway_serving(echo, certificate) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            tls = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = trust.wrap_bio(*tls, server_hostname="127.0.0.1")
            while True:
                with contextlib.suppress(ssl.SSLWantReadError):
                    client.do_handshake()
                    break
                writer.write(tls[1].read())
                tls[0].write(await reader.read(1 << 16))
            client.write(b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\nbody")
            writer.write(tls[1].read())
            await until_async(lambda: server.server_state.connections)
            (connection,) = list[Any](server.server_state.connections)
            await until_async(connection.transport.is_closing)
            assert list(server.server_state.connections) == [connection]
            await until_async(lambda: sweep([connection], 0.0))
            await until_async(lambda: not server.server_state.connections)
            tls[0].write(await reader.read())
            assert client.read(1 << 16).endswith(b"body")
            writer.close()

    run(main())


def test_parts_of_a_stream_arrive_before_its_end(run: Run, certificate: Certificate, trust: ssl.SSLContext) -> None:
    async def main() -> None:
        received = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await received.wait()
            await send({"type": "http.response.body", "body": b"last"})

        async with serving(app, tls=certificate.context) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"first\r\n")
            received.set()
            await reader.readuntil(b"last\r\n0\r\n\r\n")
            writer.close()

    run(main())


def test_a_client_that_leaves_during_a_large_upload_frees_its_connection(
    run: Run, certificate: Certificate, trust: ssl.SSLContext
) -> None:
    def leave(port: int) -> None:
        with raw(port, trust) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY))
            connection.sendall(BODY[: 2 << 20])

    async def main() -> None:
        async with serving(echo, tls=certificate.context) as (server, port):
            await asyncio.to_thread(leave, port)
            await until_async(lambda: not server.server_state.connections)

    run(main())


def test_a_client_that_does_not_finish_its_handshake_is_disconnected(
    run: Run, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "HEAD_S", 0.05)

    async def main() -> None:
        async with gateway_serving(echo, certificate) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()

    run(main())


def test_an_open_connection_continues_after_a_new_certificate(
    run: Run, authority: Authority, trust: ssl.SSLContext
) -> None:
    files = authority.issue("old")
    certificate = Certificate(*map(os.fspath, files))

    def subject(connection: http.client.HTTPSConnection) -> str:
        connection.request("POST", "/", b"a")
        assert connection.getresponse().read() == b"a"
        shown = cast("ssl.SSLSocket", connection.sock).getpeercert() or {}
        return str(dict(each[0] for each in shown["subject"])["commonName"])  # type: ignore[misc]

    def call(server: Server, port: int) -> list[str]:
        with connected(port, trust) as first, connected(port, trust) as second:
            subjects = [subject(first)]
            for file, new in zip(files, authority.issue("new"), strict=True):
                new.replace(file)
            server.tick(0)
            server.tick(0)
            return [*subjects, subject(second), subject(first)]

    async def main() -> None:
        async with gateway_serving(echo, certificate) as (server, port):
            assert await asyncio.to_thread(call, server, port) == ["old", "new", "old"]

    run(main())
