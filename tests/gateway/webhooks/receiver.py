"""A webhook receiver: a small HTTP server on loopback that stores the requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Request(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """`answers` returns the response to each request, in bytes; None means that it never answers."""

    def __init__(self) -> None:
        self.answers: Callable[[Request], bytes | None] = lambda request: OK
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                request = Request(first.split()[1], headers, body)
                answer = self.answers(request)
                self.requests.put_nowait(request)
                if answer is not None:
                    writer.write(answer)
                    await writer.drain()

    def close(self) -> None:
        for writer in self._open:
            writer.close()


@contextlib.asynccontextmanager
async def receiving(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, host, port)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        receiver.close()


def redirect(to: str, status: int = 307) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n".encode()
