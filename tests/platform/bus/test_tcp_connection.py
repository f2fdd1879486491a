"""Taking over the socket from nats-py, on both event loops. If nats-py renames its private attributes, this fails
first."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from gpufn_platform.bus import nats_protocol
from gpufn_platform.bus.connection import Bus


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_link_works_on_either_loop(nats: Any, loop: str) -> None:
    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else None

    async def scenario() -> bytes:
        bus = await Bus.connect(nats.url, name="t")
        bus.subscribe("t.echo", lambda message: bus.publish(message.reply, message.payload))
        gc.collect()  # collecting nats-py's objects must not close the socket
        answers = [await bus.request("t.echo", b"x" * size) for size in (1, 2_000_000, 3)]
        await bus.close()
        return b"".join(answer.payload for answer in answers)

    with asyncio.Runner(loop_factory=factory) as runner:
        assert len(runner.run(scenario())) == 2_000_004
        assert asyncio.all_tasks(runner.get_loop()) == set()


@pytest.mark.parametrize("cut", range(1, 140, 7))
async def test_messages_may_arrive_in_any_pieces(cut: int) -> None:
    from gpufn_platform.bus.tcp_connection import Link

    seen: list[nats_protocol.Message] = []
    transport = _Sink()
    link = Link(transport, {}, {b"7": seen.append}, lambda link, why: None, 60)
    data = (
        b"MSG a 7 3\r\nabc\r\n"
        b"PING\r\n"
        b"MSG b 7 reply 0\r\n\r\n"
        b"MSG c 8 1\r\nx\r\n"
        b"HMSG e 7 inbox 30 30\r\nNATS/1.0 503 No Responders\r\n\r\n\r\n"
        b"-ERR 'Permissions Violation for Publish to \"x\"'\r\n"
    )
    for at in range(0, len(data), cut):
        link.data_received(data[at : at + cut])
    link.close()
    assert [(m.subject, m.reply, m.payload, m.status, m.description) for m in seen] == [
        ("a", "", b"abc", 0, ""),
        ("b", "reply", b"", 0, ""),
        ("e", "inbox", b"", 503, "No Responders"),
    ]
    assert b"".join(transport.written) == b"PONG\r\n"


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 400\r\n", b"MSG a 7 x\r\n", b"MSG\r\n", b"\r\n"])
async def test_garbage_loses_the_link_once(garbage: bytes) -> None:
    from gpufn_platform.bus.tcp_connection import Link

    lost: list[str] = []
    link = Link(_Sink(), {}, {}, lambda link, why: lost.append(why), 60)
    link.data_received(garbage)
    link.connection_lost(None)
    assert len(lost) == 1
    assert "read" in lost[0]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (b"NATS/1.0\r\nA: b\r\nC:d: e\r\n\r\n", ({"A": "b", "C": "d: e"}, 0, "")),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Stream: 4\r\n\r\n",
            ({"Nats-Last-Stream": "4"}, 100, "Idle Heartbeat"),
        ),
        (b"NATS/1.0 404 No Messages\r\n\r\n", (None, 404, "No Messages")),
        (b"NATS/1.0 503\r\n\r\n", (None, 503, "")),
    ],
)
def test_headers_and_status_are_separate(block: bytes, expected: object) -> None:
    assert nats_protocol.parse_headers(block) == expected


@pytest.mark.parametrize("middle", ["", "hub.Ab3x."])
def test_both_forms_of_an_acknowledgement_are_read(middle: str) -> None:
    tail = ".rnd" if middle else ""
    assert nats_protocol.ack_tokens(f"$JS.ACK.{middle}S.C.2.7.5.1500000000.3{tail}") == (2, 7, 5, 1.5, 3)


class _Sink(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...
