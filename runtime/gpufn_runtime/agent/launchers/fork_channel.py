"""Connection between a container's process and the agent: the agent receives TemplateReady and sends ForkRequest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import PlatformError
from gpufn_core.protocol.launch import MAX_LINE_BYTES, ForkRequest, TemplateReady


class Control(asyncio.Protocol):
    """Agent's end of the connection. `path` is the socket that the process connects to. `on_gone` is called when the
    connection closes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._server: asyncio.Server | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._ready: asyncio.Future[TemplateReady] = asyncio.get_running_loop().create_future()
        self.is_open = True
        self.on_gone: Callable[[], None] = lambda: None

    async def listen(self) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: self, str(self._path))
        self._path.chmod(0o666)  # only the owner can enter the folder

    async def ready(self) -> TemplateReady:
        """Wait for the process's report. Raises PlatformError."""
        return await asyncio.shield(self._ready)

    def send(self, request: ForkRequest) -> None:
        """Send the request. Raises PlatformError."""
        if not self.is_open or self._transport is None:
            raise PlatformError("The container's process has gone away.")
        self._transport.write(msgspec.json.encode(request) + b"\n")

    def close(self) -> None:
        self.on_gone = lambda: None
        self.is_open = False
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._transport is not None:
            self._transport.close()  # flushes first
        if not self._ready.done():
            self._ready.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        if self._server is not None:  # accept one connection only: user code will run in the container later
            self._server.close()
            self._server = None

    def data_received(self, data: bytes) -> None:
        if self._ready.done():  # no further message is expected
            return
        self._buffer += data
        line, newline, _ = self._buffer.partition(b"\n")
        if not (newline or len(self._buffer) > MAX_LINE_BYTES):
            return
        try:
            self._ready.set_result(msgspec.json.decode(line, type=TemplateReady))
        except DECODE_ERRORS as error:
            self._ready.set_exception(PlatformError(f"The container's process sent an invalid message: {error}."))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if not self._ready.done():
            self._ready.set_exception(PlatformError("The container's process has ended."))
        self.on_gone()
