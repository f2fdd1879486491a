"""Docker client with a fake daemon. For tests with a real one, see docker/."""

from __future__ import annotations

import asyncio
import json
import socketserver
import tempfile
import threading
from collections.abc import Iterator

import pytest

from gpufn_runtime.agent.cache.image_recipe import Recipe
from gpufn_runtime.agent.launchers.base import ContainerEnd, DaemonUnavailable
from gpufn_runtime.agent.launchers.containers.docker_client import Docker


class _Played(socketserver.StreamRequestHandler):
    """Fake Docker daemon, which disappears in the middle of a build."""

    def handle(self) -> None:
        while head := self.rfile.readline():
            self._read_request()
            if b"/version" in head:
                self._answer(b"Content-Length: 23\r\n\r\n", b'{"ApiVersion": "1.41"}\n')
            else:
                part = json.dumps({"stream": "Step 1/5 : FROM base\n"}).encode()
                self._answer(b"Transfer-Encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n" % (len(part), part))
                return

    def _answer(self, headers: bytes, body: bytes) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + headers + body)

    def _read_request(self) -> None:
        is_chunked = False
        while (header := self.rfile.readline().strip().lower()) != b"":
            is_chunked = is_chunked or header == b"transfer-encoding: chunked"
        while is_chunked and (size := int(self.rfile.readline(), 16)) >= 0:
            self.rfile.read(size + 2)
            is_chunked = size > 0


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True  # a connection may wait for another request


@pytest.fixture
def host() -> Iterator[str]:
    # A short path, because a socket's path has a length limit.
    with tempfile.TemporaryDirectory(prefix="gpufn-") as folder, _Server(f"{folder}/s", _Played) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield f"unix://{folder}/s"
        server.shutdown()
        serving.join()


def test_a_daemon_that_disconnects_during_a_build_is_unavailable(host: str) -> None:
    heard: list[str] = []

    async def build() -> None:
        await Docker(host).build(Recipe("FROM base\n", ()), {}, "image:1", {}, heard.append)

    with pytest.raises(DaemonUnavailable, match="build image image:1"):
        asyncio.run(build())
    assert heard == ["Step 1/5 : FROM base"]


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (0, ContainerEnd(code=0)),
        (7, ContainerEnd(code=7)),
        (137, ContainerEnd(code=137, signal=9)),
        (255, ContainerEnd(code=255)),  # `sys.exit(-1)`: there is no signal 127
    ],
)
def test_an_exit_code_above_128_may_be_a_signal_s_where_there_is_one(code: int, end: ContainerEnd) -> None:
    assert ContainerEnd.of(code) == end


def test_an_exit_has_the_exceeded_memory_with_and_without_a_signal() -> None:
    assert ContainerEnd.of(1, exceeded_bytes=5) == ContainerEnd(code=1, exceeded_bytes=5)
    assert ContainerEnd.of(137, exceeded_bytes=5) == ContainerEnd(code=137, signal=9, exceeded_bytes=5)
