"""The writes of an Outbox, also after its socket has closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

from gpufn_platform.process.unix_sockets import Outbox


class Reader(asyncio.Protocol):
    def __init__(self) -> None:
        self.got = b""
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_writes_of_one_turn_are_sent_together_and_none_to_a_closed_socket(new_loop: Any, tmp_path: Any) -> None:
    trouble: list[dict[str, Any]] = []

    async def main() -> None:
        loop, reader = asyncio.get_running_loop(), Reader()
        loop.set_exception_handler(lambda _, what: trouble.append(what))
        server = await loop.create_unix_server(lambda: reader, tmp_path / "s")
        transport, writer = await loop.create_unix_connection(Reader, tmp_path / "s")
        outbox = Outbox(transport)
        outbox.write(b"a")
        outbox.write(b"b")
        await asyncio.sleep(0)
        outbox.write(b"c")
        transport.close()
        await reader.closed.wait()
        assert reader.got == b"ab"
        await writer.closed.wait()
        outbox.write(b"d")
        await asyncio.sleep(0)
        server.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert trouble == []
