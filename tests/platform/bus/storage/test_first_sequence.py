"""Where a time is in a stream."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_platform.bus.connection import PROCESSES, Bus
from gpufn_platform.bus.storage import streams

NAME = "TIMES"


async def test_a_time_is_found_between_the_messages_of_a_stream(nats: Any) -> None:
    bus = await Bus.connect(nats.url, name="test")
    try:
        await streams.ensure_stream(bus, NAME, {"subjects": ["times.>"], "allow_direct": True})
        assert await streams.first_sequence_at(bus, NAME, 0.0) in (0, 1)
        for number in range(10):
            await bus.publish_stored(f"times.{number % 2}", b"x")
        await streams.delete_message(bus, NAME, 4)
        times = {seq: found.time for seq in range(1, 11) if (found := await streams.message_at(bus, NAME, seq))}
        assert await streams.first_sequence_at(bus, NAME, times[1]) == 1
        assert await streams.first_sequence_at(bus, NAME, times[7]) == 7
        assert await streams.first_sequence_at(bus, NAME, times[5]) in (4, 5)
        assert await streams.first_sequence_at(bus, NAME, times[10] + 1) == 11
    finally:
        await bus.close()


async def test_only_the_server_can_answer_where_a_time_is(nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the request used the inbox that other processes learn, so that they could forge the response."""
    bus = await Bus.connect(nats.url, name="test")
    replies: list[str] = []
    publish = bus.publish

    def record(subject: str, payload: bytes = b"", **fields: Any) -> None:
        replies.append(fields.get("reply", ""))
        publish(subject, payload, **fields)

    try:
        await streams.ensure_stream(bus, NAME, {"subjects": ["times.>"], "allow_direct": True})
        monkeypatch.setattr(bus, "publish", record)
        await streams.first_sequence_at(bus, NAME, 0.0)
        assert replies
        assert not [reply for reply in replies if f".{PROCESSES}." in reply]
    finally:
        await bus.close()
