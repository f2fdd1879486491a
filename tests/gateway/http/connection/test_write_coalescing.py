"""Writes to the socket per iteration of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from gpufn_gateway.http.connection.write_coalescing import CoalescingTransport


class Recorded:
    """A transport that records its calls."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.did.append(data)

    def writelines(self, parts: Any) -> None:
        self.did.append(tuple(parts))

    def close(self) -> None:
        self.did.append("close")

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str) -> str:
        return name


async def test_a_head_is_sent_with_its_body() -> None:
    transport = Recorded()
    joined = CoalescingTransport(transport)  # type: ignore[arg-type]
    for part in (b"head", b" and body", b"next head", b" and body"):
        joined.write(part)
    assert transport.did == [b"head and body", b"next head and body"]
    await asyncio.sleep(0)
    assert len(transport.did) == 2


async def test_a_large_body_is_not_copied() -> None:
    transport, body = Recorded(), bytes(1 << 20)
    joined = CoalescingTransport(transport)  # type: ignore[arg-type]
    joined.write(b"head")
    joined.write(body)
    ((head, sent),) = transport.did
    assert (head, sent is body) == (b"head", True)


async def test_a_head_with_a_late_body_is_sent_at_the_end_of_the_turn() -> None:
    transport = Recorded()
    joined = CoalescingTransport(transport)  # type: ignore[arg-type]
    joined.write(b"head")
    assert transport.did == []
    await asyncio.sleep(0)
    assert transport.did == [b"head"]


async def test_held_data_is_sent_before_the_end() -> None:
    transport = Recorded()
    joined = CoalescingTransport(transport)  # type: ignore[arg-type]
    joined.write(b"refusal")
    joined.close()
    assert transport.did == [b"refusal", "close"]


async def test_nothing_is_written_to_a_disconnected_client() -> None:
    transport = Recorded()
    joined = CoalescingTransport(transport)  # type: ignore[arg-type]
    joined.write(b"head")
    transport.closing = True
    await asyncio.sleep(0)
    assert transport.did == []


async def test_all_else_is_the_transports() -> None:
    assert CoalescingTransport(Recorded()).get_extra_info("peername") == "peername"  # type: ignore[arg-type]
